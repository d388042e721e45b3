"""Free TCP ports of this machine."""

from __future__ import annotations

import socket

LOCALHOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Return `count` ports of `LOCALHOST` that the system gives to no other socket for a minute.

    A server that sets ``SO_REUSEADDR`` can listen there, as gRPC's and torch.distributed's do.
    """
    return [_reserved_port() for _ in range(count)]


def _reserved_port() -> int:
    with socket.socket() as server:
        server.bind((LOCALHOST, 0))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.listen()
        with socket.create_connection(server.getsockname()):
            # This end closes first, so its port stays in TIME_WAIT, and no other connection gets the port
            # before the job's server listens.
            server.accept()[0].close()
        return int(server.getsockname()[1])
