"""The listening sockets of a serving process, of which its supervisor keeps duplicates.

gRPC makes its sockets itself and takes over no others. A duplicate keeps a socket listening when the process
that made it has died: the kernel completes connections, and they wait until another process serves.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path


def own_listeners(port: int) -> list[int]:
    """Return the file descriptors of this process's sockets that listen on a TCP port.

    Args:
        port: the port.
    """
    numbers = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    return [number for number in numbers if _listens(number, port)]


def _listens(number: int, port: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(number)) as found:
            is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
            accepts = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return bool(is_tcp and accepts and found.getsockname()[1] == port)
    except OSError:
        # Another kind of file, or closed meanwhile, such as the directory's own.
        return False


def turn_away(listeners: Sequence[int]) -> None:
    """Close the connections that wait in sockets whose process has ended, and the sockets.

    Their clients connect again, and reach the process that listens now.

    Args:
        listeners: file descriptors of the sockets.
    """
    for number in listeners:
        with socket.socket(fileno=number) as listener:
            listener.setblocking(False)
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()
