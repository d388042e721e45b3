"""Making replica processes: spawned afresh, or forked by a fork server.

A fork server is a process that imports what all replicas need, once, and forks them before anything else
runs in it. Importing torch_xla takes seconds, a fork milliseconds. The server stays for later launches.
Processes may also be prepared ahead of time, as ``polyxla warm`` does.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Protocol

from polyxla import env
from polyxla.console import say_once
from polyxla.entry_points import entry_points
from polyxla.launcher import child, fork_server
from polyxla.launcher.process_handle import Exit, OwnProcess, Process

CLOSE_S = 1.0
"""Longest wait for a fork server's end when this process ends, in seconds."""
_MAIN = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main()"


GROUP = "polyxla.prepared"
"""Entry-point group of the one installed object that provides them."""


class ForkedProcess(Process):
    """A process that a fork server forked: a grandchild, whose end the server reports."""

    def __init__(self, server: ForkServer, number: int) -> None:
        self._server = server
        self._number = number

    @property
    def pid(self) -> int:  # type: ignore[override]
        """The process id that the server reported; 0 before it has."""
        self._server.read()
        return self._server.pids.get(self._number, 0)

    def signal(self, number: signal.Signals) -> None:
        """Signal it; if it is not forked yet, signal the server, which may be importing for long."""
        if self.pid:
            super().signal(number)
        else:
            # A process that is being forked at this moment is ended by the end of its pipe.
            self._server.process.signal(number)

    def ended(self) -> Exit | None:
        """Return the end that the server reported, or the server's own end, which also ends its children."""
        self._server.read()
        own, server = self._server.exits.get(self._number), self._server.process.ended()
        return own or (server and replace(server, server=self._server.process.pid))


class ForkServer:
    """The launching process's side of `polyxla.launcher.fork_server`.

    The server lives as long as this process, or until it has been idle for a while.

    Args:
        environ: the environment in which it imports; each process gets its own afterwards.
        preload: names of modules to import before anything is forked.
    """

    def __init__(self, environ: Mapping[str, str], preload: Sequence[str]) -> None:
        # SEQPACKET keeps the boundaries of messages, so that a number arrives with its descriptor.
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ready = prepared_processes()
        warm = ready.fork_server(theirs, environ, preload) if ready else None
        cold = [theirs.fileno()], environ, json.dumps(list(preload))
        self.process: Process = warm or _python(fork_server, *cold)
        theirs.close()
        # `read` is called whenever a process is asked about, and must not wait for news.
        self._control.setblocking(False)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self.pids: dict[int, int] = {}
        self.exits: dict[int, Exit] = {}

    def fork(self, end: Connection) -> ForkedProcess:
        """Request a process that serves the pipe whose child end is `end`."""
        number = next(self._numbers)
        # This process may have redirected its output since the server started.
        outputs = [output for output in (1, 2) if _is_inherited(output)]
        # A server that has ended is noticed when the process is waited for.
        with contextlib.suppress(OSError):
            request = json.dumps([number, *outputs]).encode()
            socket.send_fds(self._control, [request], [end.fileno(), *outputs])
        return ForkedProcess(self, number)

    def read(self) -> None:
        """Read the server's reports; never blocks."""
        # Reports are read by whichever thread asks first.
        with self._lock, contextlib.suppress(OSError):
            while data := self._control.recv(4096):
                number, pid, *end = json.loads(data)
                self.pids[number] = pid
                if end:
                    self.exits[number] = Exit(*end)

    def leave(self) -> None:
        """Close this process's end; the server ends when every process has closed it."""
        self._control.close()

    def close(self) -> None:
        """End the server, once its processes have ended; at once if it never forked any."""
        if not next(self._numbers):
            # It may still be importing, and would notice the closed socket only afterwards.
            self.process.signal(signal.SIGTERM)
        self.leave()
        self.process.wait(time.monotonic() + CLOSE_S)


def _is_inherited(descriptor: int) -> bool:
    # The number of a closed output may have become that of another file, which no process inherits.
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False


_servers: dict[tuple[str, ...], ForkServer] = {}
_servers_lock = threading.Lock()


def running_fork_server(environ: Mapping[str, str], preload: Sequence[str]) -> ForkServer:
    """Return this process's fork server that has imported `preload`; start it if there is none."""
    with _servers_lock:
        server = _servers.get(tuple(preload))
        # It may have been idle for too long, or killed.
        if server and server.process.ended():
            server.close()
            server = None
        if server is None:
            with interrupts_blocked():
                server = _servers[tuple(preload)] = ForkServer(environ, preload)
        return server


def _leave_servers() -> None:
    """In a fork of this process, leave the servers to it: they are not the fork's children."""
    global _servers_lock  # noqa: PLW0603
    # Another thread may have held it.
    _servers_lock = threading.Lock()
    for server in _servers.values():
        server.leave()
    _servers.clear()


os.register_at_fork(after_in_child=_leave_servers)


@atexit.register
def _close_servers() -> None:
    for server in _servers.values():
        server.close()


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Delay Ctrl-C while a process is started, so that none is started and then forgotten.

    The process begins with Ctrl-C blocked, and decides itself when it can take it.
    """
    # A blocked signal is inherited, so the child also starts with Ctrl-C blocked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def spawn(end: Connection, environ: Mapping[str, str]) -> OwnProcess:
    """Start a fresh Python that serves the pipe whose child end is `end`."""
    return _python(child, [end.fileno()], environ)


def _python(
    module: ModuleType, descriptors: Sequence[int], environ: Mapping[str, str], *more: str
) -> OwnProcess:
    main = _MAIN.format(module.__name__)
    # The path comes before any import: polyxla itself may be importable only by it.
    # Python ignores entries that are no strings, such as a Path.
    path = [entry for entry in sys.path if isinstance(entry, str)]
    arguments = [json.dumps(path), json.dumps(descriptors), *more]
    command = [sys.executable, *interpreter_options(), "-c", main, *arguments]
    # Without standard input: replicas that read it would take turns with the program for its lines.
    popen = subprocess.Popen(command, env=dict(environ), pass_fds=descriptors, stdin=subprocess.DEVNULL)
    return OwnProcess(popen.pid, popen)


def interpreter_options() -> list[str]:
    """Return this Python's options, such as ``-O`` and ``-W error``, for another one that runs the same."""
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
    # -u is recorded in the streams only; its variable is passed on with the environment.
    if sys.__stdout__ and sys.__stdout__.write_through and not env.snapshot().get("PYTHONUNBUFFERED"):
        options.append("-u")
    return options


class PreparedProcesses(Protocol):
    """That object. Where none of its processes fits, a process starts in the ordinary way."""

    def run_program(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Run the `command` of a `RunPlan`, and end this process as it ends; return if no process fits."""

    def fork_server(
        self, control: socket.socket, environ: Mapping[str, str], preload: Sequence[str]
    ) -> Process | None:
        """Return a process that serves `control` as `polyxla.launcher.fork_server` does, or None."""


def prepared_processes() -> PreparedProcesses | None:
    """Return the installed object, or None."""
    for point in entry_points(GROUP):
        try:
            found: PreparedProcesses = point.load()
        except Exception as error:
            # Nobody has asked for it, and each start works without.
            say_once(f"prepared processes ({point.value}) are left out: {type(error).__name__}: {error}")
        else:
            return found
    return None
