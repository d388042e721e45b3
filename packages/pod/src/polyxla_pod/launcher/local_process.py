"""The process on this machine that leads to a host, such as ssh: its lines, its input, and its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import cast

LINE_BYTES = 1 << 20
"""A longer line is passed on in parts; a host's messages are much shorter."""


class LocalProcess(asyncio.SubprocessProtocol):
    """A process whose output is taken as it comes. Belongs to the event loop in which it is made.

    asyncio's own streams are not used: their reader stops at a line that is too long, and their `wait` waits
    for the end of pipes that another process may hold, such as the master of ssh's shared connections.

    Args:
        on_line: receives each line of standard output, without its end.
        on_error: receives each line of standard error that is not empty.

    Attributes:
        exited: becomes the exit code.
        closed: is done when standard output has ended, and all its lines were passed on.
        errors_closed: the same of standard error.
    """

    def __init__(self, on_line: Callable[[bytes], None], on_error: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int | None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.errors_closed: asyncio.Future[None] = loop.create_future()
        self._on_line, self._on_error = on_line, on_error
        self._rest = {1: b"", 2: b""}
        self._transport: asyncio.SubprocessTransport | None = None

    async def start(self, command: Sequence[str]) -> None:
        """Start the process.

        Raises:
            OSError: it cannot be started.
        """
        # Ctrl-C reaches the launcher only, which ends the hosts in an orderly way.
        loop = asyncio.get_running_loop()
        await loop.subprocess_exec(lambda: self, *command, start_new_session=True)

    def write(self, data: bytes) -> None:
        """Queue data for the input; an input that has ended ignores it."""
        if (pipe := self._input()) and not pipe.is_closing():
            pipe.write(data)

    def end_input(self) -> None:
        """End the input, after what is queued."""
        if pipe := self._input():
            pipe.close()

    def kill(self) -> None:
        """End the process with SIGKILL, if it runs."""
        if self._transport and not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                self._transport.kill()

    async def close(self, timeout_s: float) -> None:
        """End the process and close all pipes. Takes at most twice the time that it has to end by itself."""
        self.end_input()
        await asyncio.wait({self.exited}, timeout=timeout_s)
        self.kill()
        await asyncio.wait({self.exited}, timeout=timeout_s)
        assert self._transport
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the handle of the process, before anything else is reported."""
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Pass on the lines that are complete."""
        *lines, rest = (self._rest[fd] + data).split(b"\n")
        for line in lines:
            self._pass_on(fd, line)
        if len(rest) > LINE_BYTES:
            self._pass_on(fd, rest)
            rest = b""
        self._rest[fd] = rest

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Pass on the last line, which has no end."""
        if fd in self._rest:
            self._pass_on(fd, self._rest[fd])
            _finish(self.closed if fd == 1 else self.errors_closed)

    def process_exited(self) -> None:
        """Take the exit code."""
        assert self._transport
        if not self.exited.done():
            self.exited.set_result(self._transport.get_returncode())

    def _pass_on(self, fd: int, line: bytes) -> None:
        if fd == 1:
            self._on_line(line)
        elif text := line.decode(errors="replace").strip():
            self._on_error(text)

    def _input(self) -> asyncio.WriteTransport | None:
        found = self._transport.get_pipe_transport(0) if self._transport else None
        return cast("asyncio.WriteTransport | None", found)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
