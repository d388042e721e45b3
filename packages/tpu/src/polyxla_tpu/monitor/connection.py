"""A TCP connection that carries JSON objects, one per line."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 50_000),
)
"""Options with which the kernel closes the connection to a host that answers nothing for 50 s."""
_LINE_BYTES = 1 << 20
"""The longest line; a foreign program may send anything."""
_SEND_TIMEOUT_S = 5.0
"""Longest wait until the other end takes a message, in seconds."""

Message = dict[str, Any]


class Connection:
    """One end of a connection. One thread receives; several may send.

    Args:
        end: the connected socket.
    """

    def __init__(self, end: socket.socket) -> None:
        for option in _KEEPALIVE:
            end.setsockopt(*option)
        end.settimeout(_SEND_TIMEOUT_S)
        self._end = end
        self._rest = b""

    @classmethod
    def open(cls, address: str, timeout_s: float) -> Connection:
        """Connect to ``host:port``.

        Raises:
            OSError: nothing listens there, or not within `timeout_s` seconds.
        """
        host, _, port = address.rpartition(":")
        return cls(socket.create_connection((host, int(port)), timeout_s))

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._end.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message.

        Raises:
            OSError: the other end is gone, or takes nothing.
        """
        self._end.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def receive(self) -> list[Message]:
        """Read what has arrived, after a selector has said that there is something; often one message.

        Raises:
            OSError: the other end is gone.
            ValueError: it speaks another protocol.
        """
        data = self._end.recv(1 << 16)
        if not data:
            raise ConnectionResetError("the connection was closed")
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if len(self._rest) > _LINE_BYTES or not all(isinstance(one, dict) for one in messages):
            raise ValueError("not the monitor's protocol")
        return messages

    def wait(self) -> list[Message]:
        """Wait for messages without a limit; raises as `receive` does."""
        self._end.settimeout(None)
        return self.receive()

    def finish(self) -> None:
        """Close it once the other end has received everything that was sent, or after `_SEND_TIMEOUT_S`."""
        # Closing at once would discard what was sent, if something has arrived that nobody has read.
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)
            while self._end.recv(1 << 16):
                pass
        self.close()

    def close(self) -> None:
        """Close it."""
        self._end.close()
