"""Messages between a client and a warm process: a length of 4 bytes, then JSON."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!I")
LONGEST_BYTES = 1 << 26
"""Longest message: an environment has at most some megabytes."""
DESCRIPTORS = 253
"""Most descriptors that the kernel sends with one message.

Source: SCM_MAX_FD of Linux's include/net/scm.h.
"""

Message = dict[str, Any]
"""One message. Texts may hold lone surrogates, as those of `os.environ` do; JSON escapes them."""


def send(connection: socket.socket, **message: Any) -> None:
    """Send a message.

    Raises:
        OSError: the other end is gone, or did not read in time.
    """
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> Message | None:
    """Return the next message; None if the other end has closed the connection, or sends something else.

    Raises:
        OSError: nothing arrived in time.
    """
    head = _read(connection, _LENGTH.size)
    if not head or _LENGTH.unpack(head)[0] > LONGEST_BYTES:
        return None
    try:
        message = json.loads(_read(connection, *_LENGTH.unpack(head)))
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def send_descriptors(connection: socket.socket, descriptors: list[int]) -> None:
    """Send descriptors, at most `DESCRIPTORS`, with one byte."""
    socket.send_fds(connection, [b"\0"], descriptors)


def receive_descriptors(connection: socket.socket) -> list[int]:
    """Return what `send_descriptors` sent; empty if the other end has closed the connection."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, DESCRIPTORS)
    return descriptors


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the other end, by the kernel."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", data)
    return int(user)


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        with contextlib.suppress(ConnectionResetError):
            if more := connection.recv(size - len(data)):
                data += more
                continue
        return b""
    return bytes(data)
