"""One connection, from the host's side: reads messages, runs the command, and ends it with the connection."""

from __future__ import annotations

import base64
import fcntl
import os
import select
import selectors
import signal
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from polyxla.plugin import snapshot
from polyxla_pod.host.processes import CommandGroup, Unpacking, WorkerProcess, adopt_orphans
from polyxla_pod.messages import WORKER_STREAM, HostMessage, decode
from polyxla_pod.tpu_nodes import TOKEN_VARIABLE

TICK_S = 0.1
"""How often deadlines and the command's end are checked, in seconds."""
UNSENT_BYTES = 1 << 20
"""How much output may wait for the connection before the command has to wait as well."""
LONGEST_LINE_BYTES = 1 << 16
"""A longer line is sent in parts of this size."""
DRAIN_S = 2.0
"""Longest wait for the last output to be read, and longest standstill while it is sent, in seconds."""
NOT_STARTED = 127
"""Exit code for a command that cannot be started, as a shell reports it."""
_READ_BYTES = 1 << 16


class HostSession:
    """The host's end of a connection. Everything except `gather` happens in the thread that calls `run`.

    The thread waits for the selector only: a child that hangs must not keep it from answering heartbeats, nor
    from noticing that the launcher is gone.

    The command ends, with all that it started, when the connection does: when the input closes, when nothing
    is received for `lost_after_s`, or when this process receives SIGTERM or SIGHUP.

    Args:
        receive: file descriptor of the launcher's messages.
        send: file descriptor for the answers.
    """

    def __init__(self, receive: int, send: int) -> None:
        self._receive, self._send_to = receive, send
        self._selector = selectors.DefaultSelector()
        self._unread = b""
        self._unsent = bytearray()
        self._heard_s = time.monotonic()
        # Defaults until the launcher's message `job`.
        self._host, self._lost_after_s, self._grace_s = 0, 15.0, 5.0
        self._group: CommandGroup | None = None
        self._worker: WorkerProcess | None = None
        self._worker_is_ready_after = ""
        # For each open stream, its file descriptor and the beginning of an incomplete line.
        self._streams: dict[str, int] = {}
        self._lines: dict[str, bytes] = {}
        self._unpacking: Unpacking | None = None
        self._is_unpacked = False
        # Calls that other threads leave to this thread, which alone may write to the connection.
        self._outcomes: list[Callable[[], None]] = []
        self._kill_at_s: float | None = None
        self._drained_by_s: float | None = None
        self._has_exited = False
        self._has_worker_exited = False
        self._is_stopping = False
        self._is_over = False

    def run(self) -> None:
        """Serve the connection until it or the command ends."""
        # This must precede the command: only later orphans are adopted.
        adopt_orphans()
        os.set_blocking(self._send_to, False)
        self._selector.register(self._receive, selectors.EVENT_READ, self._read_messages)
        # A host that shuts down sends SIGTERM, and a terminal that closes sends SIGHUP.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self._stop())
        hello = {"name": socket.gethostname(), "pid": os.getpid(), "python": sys.executable}
        self._send("hello", **hello)
        try:
            while not self._is_over:
                for key, _ in self._selector.select(TICK_S):
                    key.data()
                self._flush()
                self._apply_backpressure()
                self._check_time()
            self._send_rest()
        finally:
            if self._group:
                self._group.kill()
            if self._worker:
                self._worker.kill()
            if self._unpacking:
                self._unpacking.kill()

    def _send(self, kind: str, **content: Any) -> None:
        self._unsent += HostMessage(kind, content).encode()

    def _flush(self) -> None:
        try:
            while self._unsent:
                # The descriptor does not block: a launcher that stops reading must not stop this thread.
                sent = os.write(self._send_to, self._unsent[:_READ_BYTES])
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            # The launcher is gone.
            self._unsent.clear()
            self._stop()

    def _send_rest(self) -> None:
        left, moved = len(self._unsent), time.monotonic()
        while self._unsent and time.monotonic() - moved < DRAIN_S:
            self._flush()
            # A slow launcher must still receive the exit code, which stands behind the output.
            if len(self._unsent) < left:
                left, moved = len(self._unsent), time.monotonic()
            time.sleep(0.01)

    def _apply_backpressure(self) -> None:
        """Read output only while the connection takes it."""
        # While the command is being ended, its output is read anyway, so that it cannot block its end. Once
        # it has exited, only what it left behind prints, which could fill the memory before it is killed.
        is_being_ended = self._kill_at_s is not None and not self._has_exited
        is_full = len(self._unsent) > UNSENT_BYTES and not is_being_ended
        for stream, fd in self._streams.items():
            self._set_watched(
                fd, selectors.EVENT_READ, partial(self._read_output, stream), wanted=not is_full
            )

    def _set_watched(self, fd: int, event: int, act: Callable[[], object], *, wanted: bool) -> None:
        if wanted == (fd in {key.fd for key in self._selector.get_map().values()}):
            return
        if wanted:
            self._selector.register(fd, event, act)
        else:
            self._selector.unregister(fd)

    def _check_time(self) -> None:
        now = time.monotonic()
        if now - self._heard_s > self._lost_after_s:
            self._stop()
        if self._worker and self._worker.poll() is not None and not self._has_worker_exited:
            # The worker's exit is reported before the command's, which may be its consequence.
            self._report_worker(self._worker)
        # `list.append` and `pop` are atomic, so no lock is needed.
        while self._outcomes:
            self._outcomes.pop()()
        if self._unpacking:
            self._check_unpacking(self._unpacking)
        if not self._group:
            return
        if self._group.poll() is not None and not self._has_exited:
            self._exit(self._group)
        if self._kill_at_s is not None and now > self._kill_at_s:
            self._group.kill()
        if self._has_exited and not self._group.is_alive() and self._is_without_worker(now):
            self._finish(now)

    def _report_worker(self, worker: WorkerProcess) -> None:
        self._has_worker_exited = True
        self._read_rest([WORKER_STREAM])
        if not self._is_stopping:
            self._send("worker_exit", code=worker.poll())

    def _exit(self, group: CommandGroup) -> None:
        """Report the command's exit after its output, and begin to end what it leaves behind."""
        self._has_exited = True
        self._read_rest(group.streams)
        self._send("exit", code=group.poll())
        self._end_group(group)

    def _read_rest(self, streams: Iterable[str]) -> None:
        """Read what is in the pipes now: what the command leaves behind may print for ever."""
        for stream in streams:
            left = _waiting_bytes(self._streams[stream]) if stream in self._streams else 0
            while left > 0:
                left -= self._read_output(stream)
            # Read the end of the stream as well, for a last line without a newline.
            if stream in self._streams and select.select([self._streams[stream]], [], [], 0)[0]:
                self._read_output(stream)

    def _is_without_worker(self, now: float) -> bool:
        """Return whether no worker is left; until the launcher stops this host, other hosts may need it."""
        return not self._worker or (self._is_stopping and self._worker.end(now))

    def _finish(self, now: float) -> None:
        """Send the end once all output is read."""
        self._drained_by_s = self._drained_by_s or now + DRAIN_S
        # The wait is limited, because a process that could not be killed may hold a pipe open.
        if not self._streams or now > self._drained_by_s:
            # The launcher closes the connection only after this message.
            self._send("end")
            self._is_over = True

    def _stop(self) -> None:
        self._is_stopping = True
        if not self._group:
            self._is_over = True
        else:
            self._end_group(self._group)

    def _end_group(self, group: CommandGroup) -> None:
        if self._kill_at_s is None:
            self._kill_at_s = time.monotonic() + self._grace_s
            group.signal(signal.SIGTERM)

    def _read_messages(self) -> None:
        try:
            data = os.read(self._receive, _READ_BYTES)
        except BlockingIOError:
            # Standard input may be the same socket as standard output, which `run` has set not to block.
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(self._receive)
            self._stop()
            return
        self._heard_s = time.monotonic()
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            if message := decode(line):
                self._handle(message)

    def _handle(self, message: HostMessage) -> None:
        handlers: dict[str, Callable[..., None]] = {
            "job": self._job,
            "check": self._check,
            "archive": self._archive,
            "worker": self._start_worker,
            "start": self._start,
            "beat": self._beat,
            "stop": self._stop,
        }
        try:
            # A launcher of another version may send unknown messages or fields: refuse, and serve on.
            handlers[message.kind](**message.content)
        except Exception as error:
            self._refuse(message.kind, error)

    def _refuse(self, kind: str, error: Exception) -> None:
        """Report what cannot be done. The launcher names the host with it, and ends the connection."""
        code = NOT_STARTED if kind in ("worker", "start") else None
        self._send("error", text=f"{kind}: {type(error).__name__}: {error}", code=code)

    def _job(self, host: int, lost_after_s: float, grace_s: float) -> None:
        self._host, self._lost_after_s, self._grace_s = host, lost_after_s, grace_s

    def _beat(self, number: int) -> None:
        self._send("beat", number=number, time=time.time())

    def _check(
        self, environ: dict[str, str], directory: str | None, ports: list[int], node: dict[str, Any] | None
    ) -> None:
        """Gather the facts in a thread: the metadata server, a name server or a disk may not answer."""
        from polyxla_pod.host.facts import gather

        def work() -> None:
            try:
                facts = gather(own, _expanded(directory), ports, node)
            except Exception as error:
                self._outcomes.append(partial(self._refuse, "check", error))
            else:
                self._outcomes.append(partial(self._send, "facts", facts=facts))

        own = {**snapshot(), **environ}
        threading.Thread(target=work, name="facts", daemon=True).start()

    def _archive(self, directory: str, data: str, last: bool) -> None:
        if not self._unpacking:
            self._unpacking = Unpacking(Path(directory).expanduser())
            self._selector.register(self._unpacking.errors, selectors.EVENT_READ, self._listen_to_tar)
        self._unpacking.add(base64.b64decode(data), is_last=last)
        self._feed_tar()

    def _feed_tar(self) -> None:
        assert self._unpacking
        for _ in range(self._unpacking.feed()):
            self._send("taken")
        has_rest = self._unpacking.has_rest
        self._set_watched(self._unpacking.input, selectors.EVENT_WRITE, self._feed_tar, wanted=has_rest)
        if self._unpacking.is_complete and not has_rest:
            self._unpacking.close()

    def _listen_to_tar(self) -> None:
        assert self._unpacking
        if not self._unpacking.listen():
            self._selector.unregister(self._unpacking.errors)

    def _check_unpacking(self, unpacking: Unpacking) -> None:
        """Report tar's end, once."""
        code = unpacking.poll()
        if self._is_unpacked or code is None or not (code or unpacking.is_complete):
            return
        self._is_unpacked = True
        unpacking.listen()
        if code:
            self._refuse("archive", OSError(f"tar could not unpack it: {unpacking.reason}"))
        else:
            self._send("unpacked")

    def _start_worker(self, command: list[str], environ: dict[str, str], token: str, ready: str) -> None:
        self._worker_is_ready_after = ready
        self._worker = WorkerProcess(command, _environ(environ), token)
        self._watch(WORKER_STREAM, self._worker.output)

    def _start(self, command: list[str], environ: dict[str, str], directory: str | None) -> None:
        token = {TOKEN_VARIABLE: self._worker.token_file} if self._worker else {}
        beside = [self._worker.pid] if self._worker else []
        self._group = CommandGroup(command, _environ(environ | token), _expanded(directory), beside)
        for stream, fd in self._group.streams.items():
            self._watch(stream, fd)

    def _watch(self, stream: str, fd: int) -> None:
        self._streams[stream], self._lines[stream] = fd, b""
        self._selector.register(fd, selectors.EVENT_READ, partial(self._read_output, stream))

    def _read_output(self, stream: str) -> int:
        """Read from a stream once; return how many bytes that were."""
        fd = self._streams[stream]
        if data := os.read(fd, _READ_BYTES):
            *lines, rest = (self._lines[stream] + data).split(b"\n")
            while len(rest) > LONGEST_LINE_BYTES:
                lines.append(rest[:LONGEST_LINE_BYTES])
                rest = rest[LONGEST_LINE_BYTES:]
            self._lines[stream] = rest
        else:
            # Backpressure may have unregistered it before.
            if fd in {key.fd for key in self._selector.get_map().values()}:
                self._selector.unregister(fd)
            del self._streams[stream]
            rest = self._lines.pop(stream)
            lines = [rest] if rest else []
        for line in lines:
            # Split at fixed places, not where a read ended, so that equal lines of all hosts fold.
            for begin in range(0, max(len(line), 1), LONGEST_LINE_BYTES):
                self._send_line(stream, line[begin : begin + LONGEST_LINE_BYTES])
        return len(data)

    def _send_line(self, stream: str, line: bytes) -> None:
        # A progress bar overwrites its line with carriage returns: send only the last state.
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        self._send("line", host=self._host, stream=stream, time=time.time(), text=text)
        if stream == WORKER_STREAM and self._worker_is_ready_after in text:
            self._send("ready")


def _waiting_bytes(fd: int) -> int:
    """Return how many bytes a pipe holds."""
    count: int = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]
    return count


def _environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of a program, with this process's `python` first in its path."""
    own = snapshot()
    # A command such as `python train.py` then finds the Python with polyxla, without an activated
    # environment.
    path = f"{Path(sys.executable).parent}{os.pathsep}{own.get('PATH', os.defpath)}"
    # Python buffers what it prints to a pipe: lines would arrive late, and be lost with a killed process.
    return {**own, "PATH": path, "PYTHONUNBUFFERED": "1", **environ}


def _expanded(directory: str | None) -> str | None:
    return directory and str(Path(directory).expanduser())
