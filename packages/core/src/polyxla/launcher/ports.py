"""Free TCP ports of this machine."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing

LOCALHOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Return `count` different ports on `LOCALHOST` that nothing listens on at the moment."""
    with ExitStack() as stack:
        # All are bound before any is released, or the same port could come twice.
        probes = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for probe in probes:
            probe.bind((LOCALHOST, 0))
        return [probe.getsockname()[1] for probe in probes]
