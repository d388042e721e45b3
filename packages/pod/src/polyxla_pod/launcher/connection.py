"""The connection to one host: its process on this machine, heartbeats, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from polyxla.plugin import signal_name
from polyxla_pod.job import PodJob
from polyxla_pod.messages import SILENCES, WORKER_STREAM, HostMessage, decode, find_misfit

LINE_BYTES = 1 << 20
"""Longer lines are passed on in parts. A host's messages are much shorter."""
EXIT_S = 2.0
"""Longest wait for the process on this machine once the host has closed the connection, in seconds."""
CONFIRM_S = 3.0
"""Longest wait for a host's end beyond the command's grace, in seconds."""
LOST = 255
"""Exit code for a host that cannot be reached, or whose connection is lost. Source: ``man ssh``."""
_SAID_LINES = 20
_SAID_CHARACTERS = 1000
_WORKER_LINES = 3


class LocalProcess(asyncio.SubprocessProtocol):
    """A local process with callbacks for its output. Belongs to the event loop in which it is made.

    asyncio's own streams are not used: their reader stops at a line that is too long, and their `wait` waits
    for the end of pipes that another process may hold, such as the master of ssh's shared connections.

    Args:
        on_line: receives each line of standard output, without its end.
        on_error: receives each line of standard error that is not empty.

    Attributes:
        exited: becomes the exit code.
        closed: is done when standard output has ended, and all its lines were passed on.
        errors_closed: the same for standard error.
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
        # The session of its own keeps Ctrl-C from it: the launcher ends the hosts in order.
        loop = asyncio.get_running_loop()
        await loop.subprocess_exec(lambda: self, *command, start_new_session=True)

    def write(self, data: bytes) -> None:
        """Queue data for the input; an input that has ended ignores it."""
        if (pipe := self._input()) and not pipe.is_closing():
            # asyncio buffers what the pipe does not take. Archives are limited by `UNTAKEN_PARTS`.
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
        # The host sees the end of the input, and ends; the local process ends after it.
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
        # Without a limit, a program that prints no newline would fill the memory.
        if len(rest) > LINE_BYTES:
            self._pass_on(fd, rest)
            rest = b""
        self._rest[fd] = rest

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Pass on the last line, which has no end."""
        # asyncio also reports the end of the input, which has no lines.
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


@dataclass(frozen=True)
class End:
    """How a host ended.

    Attributes:
        code: the command's exit code, negative for a signal; None if the host did not report one.
        problem: what went wrong, if it is not the exit code alone.
        is_worker: whether the worker ended, and not the command.
    """

    code: int | None
    problem: str | None = None
    is_worker: bool = False

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it; for a host that did not report one 255, as ssh does."""
        if self.code is None:
            return LOST
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        return self.problem or f"the command {_ended(self.code)}"


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal_name(-code)}"
    return f"ended with exit code {code}"


class HostEndedError(Exception):
    """The host ended before it answered; `HostConnection.ended` says how."""


class HostConnection:
    """One host, seen from the launcher. Belongs to the event loop in which it is made.

    Args:
        host: the host's number.
        job: what is run.
        command: the local command that a transport made for the host.
        on_line: receives the host's number, the stream (``out`` or ``err``) and the text of each line.

    Attributes:
        ended: becomes the command's end, while what the command started may still be ended.
        clock_difference_s: how far the host's clock is ahead of this machine's, as the last heartbeat shows.
    """

    def __init__(
        self, host: int, job: PodJob, command: Sequence[str], on_line: Callable[[int, str, str], None]
    ) -> None:
        self.host = host
        self.ended: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.clock_difference_s = 0.0
        self._job, self._command, self._on_line = job, list(command), on_line
        self._is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers: dict[str, asyncio.Future[HostMessage]] = {}
        self._said: deque[str] = deque(maxlen=_SAID_LINES)
        self._worker_said: deque[str] = deque(maxlen=_WORKER_LINES)
        self._process: LocalProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._taken = 0
        self._heard_s = 0.0
        self._beats: dict[int, float] = {}
        self._has_answered = False

    async def open(self) -> None:
        """Start the local process, and wait for the host's first message.

        Raises:
            HostEndedError: it does not come within the job's `connect_s`.
        """
        process = LocalProcess(self._hear, self._said.append)
        try:
            await process.start(self._command)
        except OSError as error:
            self._end(End(None, f"{self._command[0]} cannot be started: {error}"))
            raise HostEndedError from None
        self._process = process
        self._tasks = [asyncio.create_task(self._watch(process))]
        self.send("job", host=self.host, lost_after_s=self._job.lost_after_s, grace_s=self._job.grace_s)
        await self.answer("hello", self._job.connect_s)
        self._has_answered = True
        self._heard_s = time.monotonic()
        self._tasks.append(asyncio.create_task(self._send_heartbeats()))

    def send(self, kind: str, **content: Any) -> None:
        """Queue a message; a connection that has ended ignores it."""
        if self._process:
            self._process.write(HostMessage(kind, content).encode())

    async def taken(self, count: int, timeout_s: float) -> None:
        """Wait until the host has written that many parts of an archive.

        Raises:
            HostEndedError: the host ended first, or wrote no part in time, which ends it.
        """
        while self._taken < count:
            # Each part is answered, so the previous answer must not end this wait.
            self._answers.pop("taken", None)
            await self.answer("taken", timeout_s)

    async def worker_ready(self, timeout_s: float) -> None:
        """Wait until clients can connect to the host's worker.

        Raises:
            HostEndedError: the host or its worker ended first, or the worker was not ready in time.
        """
        ready = self._future("ready")
        either: set[asyncio.Future[Any]] = {ready, self.ended}
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            # Without effect if it has ended.
            self.fail(self._of_worker(f"was not ready within {timeout_s:g} s"))
            raise HostEndedError

    async def answer(self, kind: str, timeout_s: float) -> HostMessage:
        """Wait for a message of this kind.

        Raises:
            HostEndedError: the host ended first, or did not answer in time, which ends it.
        """
        answer = self._future(kind)
        either: set[asyncio.Future[Any]] = {answer, self.ended}
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        # Without effect if it has ended.
        self.fail(f"did not answer within {timeout_s:g} s")
        raise HostEndedError

    def fail(self, problem: str) -> None:
        """End the connection because of a problem; the host then ends the command by itself."""
        self._end(End(None, problem))
        self.kill()

    def kill(self) -> None:
        """End the local process at once, which closes the host's input."""
        if self._process:
            self._process.kill()

    async def stop(self) -> None:
        """End the command and the connection. Takes at most the grace and `CONFIRM_S`."""
        self.send("stop")
        if not self._has_answered:
            # Nothing has been started, and a local process that still connects reads no message.
            self.kill()
        if self._tasks:
            await asyncio.wait({self._is_over}, timeout=self._job.grace_s + CONFIRM_S)
        # This has no effect if the host has confirmed, since the first end counts.
        self._end(End(None, "did not confirm its end"))
        if self._process:
            await self._process.close(EXIT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _future(self, kind: str) -> asyncio.Future[HostMessage]:
        # An answer may arrive before anything waits for it.
        return self._answers.setdefault(kind, asyncio.get_running_loop().create_future())

    def _end(self, end: End) -> None:
        if not self.ended.done():
            self.ended.set_result(end)

    def _set_over(self) -> None:
        if not self._is_over.done():
            self._is_over.set_result(None)

    async def _watch(self, process: LocalProcess) -> None:
        """Wait until the host has closed its output, and report that if it is how the host ends."""
        either: set[asyncio.Future[Any]] = {process.closed, process.exited}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        # Its last error may arrive later. The wait is limited, because another process, such as the master
        # of ssh's shared connections, may hold the pipes open.
        await asyncio.wait({*either, process.errors_closed}, timeout=EXIT_S)
        if not self.ended.done():
            self._end(End(None, self._closed(process)))
        self._set_over()

    def _hear(self, line: bytes) -> None:
        """Receive a line from the host."""
        if message := decode(line):
            self._heard_s = time.monotonic()
            if misfit := find_misfit(message):
                self.fail(f"sent {misfit}")
            else:
                self._receive(message)
        elif self._has_answered and len(line) > LINE_BYTES:
            # Before the first answer, ssh and shells may print what they like.
            self.fail("sent more than 1 MiB without the end of a line")
        elif text := line.decode(errors="replace").strip():
            self._said.append(text[:_SAID_CHARACTERS])

    def _receive(self, message: HostMessage) -> None:
        content = message.content
        if message.kind == "line":
            if content["stream"] == WORKER_STREAM:
                # Keep these lines for the error: a worker that fails prints the reason before it ends.
                self._worker_said.append(content["text"])
            self._on_line(self.host, content["stream"], content["text"])
        elif message.kind == "worker_exit":
            # Even a worker that ended without an error leaves its command without devices.
            code = content["code"]
            self._end(End(code or 1, self._of_worker(_ended(code)), is_worker=True))
        elif message.kind == "exit":
            self._end(End(content["code"]))
        elif message.kind == "end":
            self._set_over()
        elif message.kind == "error":
            self._end(End(content["code"], content["text"]))
            self.kill()
        elif message.kind == "beat":
            if (sent := self._beats.pop(content["number"], None)) is not None:
                # The host read its clock about halfway between the sending and the answer.
                self.clock_difference_s = content["time"] - (sent + time.time()) / 2
        else:
            self._take_answer(message)

    def _take_answer(self, message: HostMessage) -> None:
        if message.kind == "taken":
            self._taken += 1
        if not (answer := self._future(message.kind)).done():
            answer.set_result(message)

    def _of_worker(self, how: str) -> str:
        said = f"; it printed last: {' / '.join(self._worker_said)}" if self._worker_said else ""
        return f"its worker at {self._job.worker_address(self.host)} {how}{said}"

    def _closed(self, process: LocalProcess) -> str:
        """Return why the host closed the connection without an end."""
        code = process.exited.result() if process.exited.done() else None
        what = "the connection was closed" if self._has_answered else "could not be reached"
        ended = "" if code is None else f": {self._command[0]} ended with exit code {code}"
        return f"{what}{ended}" + (f": {self._said[-1]}" if self._said else "")

    async def _send_heartbeats(self) -> None:
        number, limit_s = 0, self._job.lost_after_s
        # Heartbeats go on after the command's end, because the host's worker serves until all have ended.
        while not self._is_over.done():
            self._beats[number] = time.time()
            self.send("beat", number=number)
            number += 1
            # Wake up at the limit at the latest, so that a lost host is reported on time.
            left_s = self._heard_s + limit_s - time.monotonic()
            await asyncio.sleep(max(min(limit_s / SILENCES, left_s), 0))
            if time.monotonic() - self._heard_s >= limit_s:
                self.fail(f"did not answer for {limit_s:g} s: its link is cut, or the machine is gone")
