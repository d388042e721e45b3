"""How a process for replicas comes to be: started afresh, forked from this one, or from a fork server.

A fork server is a process that imports what all replicas need, once, and forks them before anything
runs. Importing torch_xla takes seconds; a fork takes none. It stays for the launches that follow.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType

from polyxla.launcher import child, fork_server

LOOK_S = 0.01
"""How often to look whether a process that was told to end has ended, in seconds."""
CLOSE_S = 1.0
"""How long to wait for a fork server's end, in seconds, when this process ends."""
_MAIN = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main()"


@dataclass(frozen=True)
class Exit:
    """How a process ended.

    Attributes:
        code: its exit code; the negative number of a signal that ended it.
        peak_bytes: the most memory it held at once, shared pages included.
    """

    code: int
    peak_bytes: int

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exited with code {self.code}"
        how = f"was ended by {signal.Signals(-self.code).name}"
        held = f"it had held {self.peak_bytes / 2**20:,.0f} MiB at its peak"
        return f"{how} (often the kernel, when memory runs out; {held})" if self.code == -9 else how


class Process(ABC):
    """A process that this one may end, and whose end it sees.

    Attributes:
        pid: its number; 0 as long as its fork server has not forked it.
    """

    pid: int

    @abstractmethod
    def ended(self) -> Exit | None:
        """Return how it ended, or None while it lives; never waits."""

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it still lives."""
        if self.ended() is None and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, deadline: float) -> Exit | None:
        """Wait for its end until `time.monotonic()` is `deadline`; None if it still lives then."""
        while (end := self.ended()) is None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return end


class OwnProcess(Process):
    """A child of this process."""

    def __init__(self, pid: int, popen: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._popen = popen
        self._end: Exit | None = None

    def ended(self) -> Exit | None:
        """Look with wait4, which also tells the peak of its memory."""
        if self._end is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self._end = Exit(os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)
                if self._popen:
                    # Or it would look for its child itself, which is gone.
                    self._popen.returncode = self._end.code
        return self._end


class ServedProcess(Process):
    """A process that a fork server forked: a grandchild, whose end the server reports."""

    def __init__(self, server: ForkServer, number: int) -> None:
        self._server = server
        self._number = number

    @property
    def pid(self) -> int:  # type: ignore[override]
        """The number that the server reported."""
        self._server.read()
        return self._server.pids.get(self._number, 0)

    def ended(self) -> Exit | None:
        """Return what the server reported, or the server's own end, which nobody survives."""
        self._server.read()
        return self._server.exits.get(self._number) or self._server.process.ended()


class ForkServer:
    """The parent's side of `polyxla.launcher.fork_server`, which lives as long as this process or until it is idle.

    Args:
        environ: the environment in which it imports; each process gets its own afterwards.
        preload: names of modules to import before anything is forked.
    """

    def __init__(self, environ: Mapping[str, str], preload: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = _python(fork_server, [theirs.fileno()], environ, json.dumps(list(preload)))
        theirs.close()
        self._control.setblocking(False)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self.pids: dict[int, int] = {}
        self.exits: dict[int, Exit] = {}

    def fork(self, end: Connection) -> ServedProcess:
        """Have a process forked that serves the pipe whose other end is here."""
        number = next(self._numbers)
        # One that has ended shows that when the process is waited for.
        with contextlib.suppress(OSError):
            socket.send_fds(self._control, [json.dumps(number).encode()], [end.fileno()])
        return ServedProcess(self, number)

    def read(self) -> None:
        """Take what it has reported; never waits."""
        with self._lock, contextlib.suppress(OSError):
            while data := self._control.recv(4096):
                number, pid, *end = json.loads(data)
                self.pids[number] = pid
                if end:
                    self.exits[number] = Exit(*end)

    def close(self) -> None:
        """Let it end, which it does as soon as its processes have; at once if it never had any."""
        if not next(self._numbers):
            # It may still be importing, and would see only afterwards that nobody needs it.
            self.process.signal(signal.SIGTERM)
        self._control.close()
        self.process.wait(time.monotonic() + CLOSE_S)


_servers: dict[tuple[str, ...], ForkServer] = {}
_servers_lock = threading.Lock()


def running_fork_server(environ: Mapping[str, str], preload: Sequence[str]) -> ForkServer:
    """Return the fork server of this process that has imported `preload`; start it if there is none."""
    with _servers_lock:
        server = _servers.get(tuple(preload))
        if server and server.process.ended():
            server.close()
            server = None
        if server is None:
            server = _servers[tuple(preload)] = ForkServer(environ, preload)
        return server


@atexit.register
def _close_servers() -> None:
    for server in _servers.values():
        server.close()


def spawn(end: Connection, environ: Mapping[str, str]) -> OwnProcess:
    """Start a fresh Python that serves the pipe whose other end is here."""
    return _python(child, [end.fileno()], environ)


def _python(
    module: ModuleType, descriptors: Sequence[int], environ: Mapping[str, str], *more: str
) -> OwnProcess:
    command = [
        sys.executable,
        "-c",
        _MAIN.format(module.__name__),
        json.dumps(sys.path),
        json.dumps(descriptors),
        *more,
    ]
    popen = subprocess.Popen(command, env=dict(environ), pass_fds=descriptors, stdin=subprocess.DEVNULL)
    return OwnProcess(popen.pid, popen)
