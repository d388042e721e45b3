"""A TCP connection that carries JSON objects, one per line, each behind its seal.

Anyone can connect. The listening side sends a number that it uses once, and both sides seal what they send
with it. So a line that another user of the machine wrote, or recorded earlier, is not accepted.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from typing import Any

from polyxla.tpu.secret import sealed, unsealed

_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 50_000),
)
"""Options with which the kernel closes the connection to a host that answers nothing for 50 s."""
_LINE_BYTES = 1 << 20
"""The longest line."""
_UNPROVED_BYTES = 1 << 12
"""The longest line of an end that has not yet proved that it knows the secret."""
_GREETING_CHARS = 32
_SEND_TIMEOUT_S = 5.0
"""Longest wait until the other end takes a message, in seconds."""

Message = dict[str, Any]


class SealedConnection:
    """One end of a connection. One thread receives; several may send. `open` and `accept` make them.

    Args:
        end: the connected socket.
        secret: the job's.
        greeting: what the listening side has said.
        directions: what the messages from here are called, and those from the other end.

    Attributes:
        is_proved: whether the other end has sent a message, and hence knows the secret.
    """

    def __init__(self, end: socket.socket, secret: str, greeting: str, directions: tuple[str, str]) -> None:
        # Without them, a host that loses its power would look connected for hours.
        for option in _KEEPALIVE:
            end.setsockopt(*option)
        end.settimeout(_SEND_TIMEOUT_S)
        self.is_proved = False
        self._end = end
        self._secret = secret
        self._sent, self._received = (f"{direction} {greeting}" for direction in directions)
        self._rest = b""

    @classmethod
    def open(cls, address: str, secret: str, timeout_s: float) -> SealedConnection:
        """Connect to ``host:port``.

        Raises:
            OSError: nothing of ours listens there, or not within `timeout_s` seconds.
        """
        host, _, port = address.rpartition(":")
        deadline = time.monotonic() + timeout_s
        end = socket.create_connection((host, int(port)), timeout_s)
        try:
            greeting = _greeting(end, deadline)
            return cls(end, secret, greeting, ("to the monitor", "from the monitor"))
        except BaseException:
            end.close()
            raise

    @classmethod
    def accept(cls, listener: socket.socket, secret: str) -> SealedConnection:
        """Accept a connection.

        Raises:
            OSError: it is gone again.
        """
        end, _ = listener.accept()
        # Each connection has its own: a line that was recorded on another one has the wrong seal here.
        greeting = secrets.token_hex(_GREETING_CHARS // 2)
        try:
            end.settimeout(_SEND_TIMEOUT_S)
            end.sendall(greeting.encode())
            return cls(end, secret, greeting, ("from the monitor", "to the monitor"))
        except BaseException:
            end.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._end.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message.

        Raises:
            OSError: the other end is gone, or takes nothing.
        """
        message = json.dumps({"kind": kind, **fields}).encode()
        self._end.sendall(sealed(self._secret, self._sent, message) + b"\n")

    def receive(self) -> list[Message]:
        """Read what has arrived, after a selector has said that there is something; often one message.

        Raises:
            OSError: the other end is gone.
            ValueError: it does not know the secret, or speaks another protocol.
        """
        data = self._end.recv(1 << 16)
        if not data:
            raise ConnectionResetError("the connection was closed")
        # What follows the last end of a line is the beginning of a message, and waits for the rest.
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages = [self._message(line) for line in lines]
        self.is_proved = self.is_proved or bool(messages)
        # Without a limit, another user could fill this process's memory with one endless line.
        if len(self._rest) > (_LINE_BYTES if self.is_proved else _UNPROVED_BYTES):
            raise ValueError("not the monitor's protocol")
        return messages

    def _message(self, line: bytes) -> Message:
        message = json.loads(unsealed(self._secret, self._received, line))
        if not isinstance(message, dict):
            raise ValueError("not the monitor's protocol")
        return message

    def wait(self) -> list[Message]:
        """Wait for messages without a limit; raises as `receive` does."""
        # Only this end's waiting thread calls it, and it has nothing else to do.
        self._end.settimeout(None)
        return self.receive()

    def finish(self) -> None:
        """Close it once the other end has received everything that was sent, or after `_SEND_TIMEOUT_S`."""
        # Closing a socket with unread data resets the connection, and the other end loses what was sent.
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)
            while self._end.recv(1 << 16):
                pass
        self.close()

    def close(self) -> None:
        """Close it."""
        self._end.close()


def _greeting(end: socket.socket, deadline: float) -> str:
    """Read what the listening side says first."""
    greeting = b""
    while len(greeting) < _GREETING_CHARS:
        end.settimeout(max(0.001, deadline - time.monotonic()))
        if not (data := end.recv(_GREETING_CHARS - len(greeting))):
            raise ConnectionResetError("the connection was closed")
        greeting += data
    return greeting.decode("latin-1")
