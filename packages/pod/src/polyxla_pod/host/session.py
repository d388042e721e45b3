"""One connection, from the host's side: reads messages, runs the command, and ends it with the connection."""

from __future__ import annotations

import base64
import contextlib
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from polyxla.env import snapshot
from polyxla_pod.host.command_group import CommandGroup, adopt_orphans
from polyxla_pod.messages import Message, decode

TICK_S = 0.1
"""How often deadlines and the command's end are checked, in seconds."""
UNSENT_BYTES = 1 << 20
"""How much output may wait for the connection before the command has to wait as well."""
LONGEST_LINE_BYTES = 1 << 16
"""A longer line is sent in parts of this size."""
DRAIN_S = 2.0
"""Longest wait for the last output to be read, and again for it to be sent, in seconds."""
NOT_STARTED = 127
"""Exit code for a command that cannot be started, as a shell reports it."""
_READ_BYTES = 1 << 16


class Session:
    """The host's end of a connection. Everything happens in the thread that calls `run`.

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
        # Until the launcher says otherwise.
        self._host, self._lost_after_s, self._grace_s = 0, 15.0, 5.0
        self._group: CommandGroup | None = None
        self._lines: dict[str, bytes] = {}
        self._unpacking: subprocess.Popen[bytes] | None = None
        self._kill_at_s: float | None = None
        self._drained_by_s: float | None = None
        self._has_exited = False
        self._is_over = False

    def run(self) -> None:
        """Serve the connection until it or the command ends."""
        adopt_orphans()
        os.set_blocking(self._send_to, False)
        self._selector.register(self._receive, selectors.EVENT_READ, self._read_messages)
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

    def _send(self, kind: str, **content: Any) -> None:
        self._unsent += Message(kind, content).encode()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = os.write(self._send_to, self._unsent[:_READ_BYTES])
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            # The launcher is gone.
            self._unsent.clear()
            self._stop()

    def _send_rest(self) -> None:
        deadline = time.monotonic() + DRAIN_S
        while self._unsent and time.monotonic() < deadline:
            self._flush()
            time.sleep(0.01)

    def _apply_backpressure(self) -> None:
        """Read the command's output only while the connection takes it."""
        if not self._group:
            return
        is_full = len(self._unsent) > UNSENT_BYTES and self._kill_at_s is None
        watched = {key.fd for key in self._selector.get_map().values()}
        for stream in self._lines:
            fd = self._group.streams[stream]
            if is_full and fd in watched:
                self._selector.unregister(fd)
            elif not is_full and fd not in watched:
                self._selector.register(fd, selectors.EVENT_READ, partial(self._read_output, stream))

    def _check_time(self) -> None:
        now = time.monotonic()
        if now - self._heard_s > self._lost_after_s:
            self._stop()
        if not self._group:
            return
        if self._group.poll() is not None and not self._has_exited:
            self._exit()
        if self._kill_at_s is not None and now > self._kill_at_s:
            self._group.kill()
        if self._has_exited and not self._group.is_alive():
            self._finish(now)

    def _exit(self) -> None:
        """Report the command's exit after its output, and begin to end what it leaves behind."""
        assert self._group
        self._has_exited = True
        for stream, fd in self._group.streams.items():
            while stream in self._lines and select.select([fd], [], [], 0)[0]:
                self._read_output(stream)
        self._send("exit", code=self._group.poll())
        self._stop()

    def _finish(self, now: float) -> None:
        """Send the end once all output is read."""
        self._drained_by_s = self._drained_by_s or now + DRAIN_S
        # A process that could not be killed may hold a pipe open.
        if not self._lines or now > self._drained_by_s:
            self._send("end")
            self._is_over = True

    def _stop(self) -> None:
        if not self._group:
            self._is_over = True
        elif self._kill_at_s is None:
            self._kill_at_s = time.monotonic() + self._grace_s
            self._group.signal(signal.SIGTERM)

    def _read_messages(self) -> None:
        try:
            data = os.read(self._receive, _READ_BYTES)
        except BlockingIOError:
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

    def _handle(self, message: Message) -> None:
        handlers: dict[str, Callable[..., None]] = {
            "job": self._job,
            "check": self._check,
            "archive": self._archive,
            "start": self._start,
            "beat": self._beat,
            "stop": self._stop,
        }
        try:
            handlers[message.kind](**message.content)
        except Exception as error:
            # The launcher names the host with it, and ends the connection.
            code = NOT_STARTED if message.kind == "start" else None
            self._send("error", text=f"{message.kind}: {type(error).__name__}: {error}", code=code)

    def _job(self, host: int, lost_after_s: float, grace_s: float) -> None:
        self._host, self._lost_after_s, self._grace_s = host, lost_after_s, grace_s

    def _beat(self, number: int) -> None:
        self._send("beat", number=number, time=time.time())

    def _check(self, environ: dict[str, str], directory: str | None, ports: list[int]) -> None:
        from polyxla_pod.host.facts import gather

        self._send("facts", facts=gather({**snapshot(), **environ}, _expanded(directory), ports))

    def _archive(self, directory: str, data: str, last: bool) -> None:
        if not self._unpacking:
            target = Path(directory).expanduser()
            target.mkdir(parents=True, exist_ok=True)
            command = ["tar", "-xzf", "-", "-C", str(target)]
            self._unpacking = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self._unpacking.stdin
        assert self._unpacking.stderr
        with contextlib.suppress(BrokenPipeError):
            self._unpacking.stdin.write(base64.b64decode(data))
        if last:
            with contextlib.suppress(BrokenPipeError):
                self._unpacking.stdin.close()
            said = self._unpacking.stderr.read().decode(errors="replace").strip()
            if self._unpacking.wait() != 0:
                raise OSError(f"tar could not unpack into {directory}: {said}")
            self._send("unpacked")

    def _start(self, command: list[str], environ: dict[str, str], directory: str | None) -> None:
        own = snapshot()
        # `python` in the command is the one that runs this.
        path = f"{Path(sys.executable).parent}{os.pathsep}{own.get('PATH', os.defpath)}"
        whole = {**own, "PATH": path, "PYTHONUNBUFFERED": "1", **environ}
        self._group = CommandGroup(command, whole, _expanded(directory))
        for stream, fd in self._group.streams.items():
            self._lines[stream] = b""
            self._selector.register(fd, selectors.EVENT_READ, partial(self._read_output, stream))

    def _read_output(self, stream: str) -> None:
        assert self._group
        fd = self._group.streams[stream]
        if data := os.read(fd, _READ_BYTES):
            *lines, rest = (self._lines[stream] + data).split(b"\n")
            while len(rest) > LONGEST_LINE_BYTES:
                lines.append(rest[:LONGEST_LINE_BYTES])
                rest = rest[LONGEST_LINE_BYTES:]
            self._lines[stream] = rest
        else:
            if fd in {key.fd for key in self._selector.get_map().values()}:
                self._selector.unregister(fd)
            rest = self._lines.pop(stream)
            lines = [rest] if rest else []
        for line in lines:
            # At the same places on all hosts, whatever one read has returned.
            for begin in range(0, max(len(line), 1), LONGEST_LINE_BYTES):
                self._send_line(stream, line[begin : begin + LONGEST_LINE_BYTES])

    def _send_line(self, stream: str, line: bytes) -> None:
        # A progress bar overwrites its line, and only its last state is of use.
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        self._send("line", host=self._host, stream=stream, time=time.time(), text=text)


def _expanded(directory: str | None) -> str | None:
    return directory and str(Path(directory).expanduser())
