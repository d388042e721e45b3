"""Free TCP ports of this machine."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

LOCALHOST = "127.0.0.1"
_FIRST, _LAST = 10_000, 29_999
"""The ports to choose from. Kubernetes takes those from 30,000 on for services.
Source: ``--service-node-port-range`` of kube-apiserver.
"""
_ATTEMPTS = 100
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The ports that Linux gives to sockets that ask for any."""


def free_ports(count: int) -> list[int]:
    """Return `count` ports of `LOCALHOST` that the system gives to no other socket for a minute.

    A server that sets ``SO_REUSEADDR`` can listen there, as gRPC's and torch.distributed's do.

    Raises:
        OSError: no port is free.
    """
    return [_reserved_port() for _ in range(count)]


def _reserved_port() -> int:
    # Other jobs, and gloo, ask for any port with SO_REUSEADDR: Linux gives them one of its own range in spite
    # of the reservation below. So it is chosen outside, at random, because other jobs choose there, too.
    chosen = random.SystemRandom()
    last = min(_LAST, _first_given() - 1)
    for _ in range(_ATTEMPTS if last > _FIRST else 0):
        with contextlib.suppress(OSError):
            return _reserve(chosen.randint(_FIRST, last))
    return _reserve(0)


def _first_given() -> int:
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _reserve(port: int) -> int:
    """Reserve a port, or any if it is 0.

    Raises:
        OSError: a socket has it, or it is reserved.
    """
    # A server of the job may listen on all addresses.
    with socket.socket() as everywhere:
        everywhere.bind(("", port))
        port = everywhere.getsockname()[1]
    with socket.socket() as server:
        server.bind((LOCALHOST, port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.listen()
        with socket.create_connection(server.getsockname()):
            # This end closes first, so its port stays in TIME_WAIT, and no other job reserves it before the
            # job's server listens.
            server.accept()[0].close()
    return port
