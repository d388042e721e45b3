"""The warm process: import once, then fork programs and fork servers for this user's clients.

It has one thread, touches no device, and listens on a socket in the user's private directory. A client sends
its request, the process answers whether it fits, the client sends its descriptors, and the process forks.
Then it reports the fork's process id and its end, and takes signals for it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyxla import PolyxlaError
from polyxla.plugin import env
from polyxla_tools.warm.preparation import Options, Preparation, prepare, spawn
from polyxla_tools.warm.program import become_fork_server, become_program
from polyxla_tools.warm.sockets import (
    Message,
    new_socket,
    peer_user,
    reachable,
    receive,
    receive_descriptors,
    send,
)

HANDSHAKE_S = 2.0
"""Longest wait for each part of a client's request, in seconds: other clients wait for it."""
ForkWork = Callable[[], None]


@dataclass(frozen=True)
class Fork:
    """A forked process.

    Attributes:
        connection: its client's; the end of the process is reported there.
        is_program: whether it is a program, which ends with its client; fork servers see that themselves.
    """

    connection: socket.socket
    is_program: bool


class Forks:
    """The running forks, by process id."""

    def __init__(self) -> None:
        self._running: dict[int, Fork] = {}
        self.served = 0

    def __len__(self) -> int:
        return len(self._running)

    def add(self, pid: int, fork: Fork) -> None:
        """Add a process that has been forked, and report its process id."""
        self._running[pid] = fork
        self.served += 1
        _report(fork, pid=pid)

    def has(self, connection: socket.socket) -> bool:
        """Return whether a running fork has this connection."""
        return any(fork.connection is connection for fork in self._running.values())

    def connections(self) -> list[socket.socket]:
        """Return the connections on which clients may send signals, or end."""
        return [fork.connection for fork in self._running.values() if fork.connection.fileno() >= 0]

    def read(self, connection: socket.socket) -> None:
        """Pass on a signal from a client, or end its program because the client has ended."""
        pid, fork = next(item for item in self._running.items() if item[1].connection is connection)
        try:
            message = receive(connection)
        except OSError:
            message = None
        number = (message or {}).get("signal")
        # The process may just have ended, or have changed its user.
        with contextlib.suppress(OSError, OverflowError):
            if message and isinstance(number, int):
                (os.killpg if message.get("is_for_group") else os.kill)(pid, number)
                return
            connection.close()
            if fork.is_program:
                os.kill(pid, signal.SIGKILL)

    def reap(self) -> None:
        """Report the forks that have ended."""
        with contextlib.suppress(ChildProcessError):
            while True:
                # SIGCHLD is not queued: one signal may stand for several ends.
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    return
                # A child that is not a fork is the successor of this process.
                if fork := self._running.pop(pid, None):
                    code = os.waitstatus_to_exitcode(status)
                    _report(fork, exit=code, peak_bytes=usage.ru_maxrss * 1024)
                    fork.connection.close()

    def forget(self) -> None:
        """Close all connections, in a fork, so that clients see when they close."""
        for fork in self._running.values():
            fork.connection.close()


def _report(fork: Fork, **values: int) -> None:
    # A client that has ended does not read its report.
    with contextlib.suppress(OSError):
        send(fork.connection, **values)


def main() -> None:
    """Prepare, by the options in the first argument, and serve; in a fork, be what the client asked for."""
    options = Options(**json.loads(sys.argv[1]))
    directory = str(Path.cwd())
    # Ctrl-C in the terminal where it was started is meant for the commands there.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        preparation = prepare(options)
        # Each running fork takes a descriptor here. Programs get the limits of their clients.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        path = new_socket(env.snapshot(), os.getpid())
        server = Server(preparation, options, path, directory)
    except Exception as error:
        problem = str(error) if isinstance(error, PolyxlaError) else f"{type(error).__name__}: {error}"
        _answer(options, problem=problem)
        sys.exit(1)
    _answer(options, pid=os.getpid())
    work = server.serve()
    if work is None:
        # An orderly exit would tear down torch, which takes time and changes nothing.
        os._exit(0)
    work()


def _answer(options: Options, **answer: Any) -> None:
    if options.ready >= 0:
        os.write(options.ready, json.dumps(answer).encode())
        os.close(options.ready)


class Server:
    """The warm process's loop.

    Args:
        preparation: what was imported.
        options: how it was started.
        path: of its socket.
        directory: the working directory for its successor, the same as its own at the start.
    """

    def __init__(self, preparation: Preparation, options: Options, path: Path, directory: str) -> None:
        self._preparation = preparation
        # No command waits for a successor.
        self._options = replace(options, ready=-1)
        self._directory = directory
        self._path = path
        self._started = self._busy = time.monotonic()
        self._forks = Forks()
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX)
        with reachable(path) as name:
            self._listener.bind(name)
        self._listener.listen()
        # SIGCHLD writes to this socket, which wakes the thread from `select`.
        self._woken, self._wakes = socket.socketpair()
        # `signal.set_wakeup_fd` requires a socket that does not block.
        self._wakes.setblocking(False)
        # `_turn_away` gives this descriptor up for a moment when no other is free.
        self._spare = os.open(os.devnull, os.O_RDONLY)
        signal.set_wakeup_fd(self._wakes.fileno())
        # Without a handler in Python, the signal would not write to the socket.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # It must not keep the file system of that directory busy.
        os.chdir("/")
        # A collection in a fork would write to every object, and so copy the shared memory pages.
        gc.collect()
        gc.freeze()

    def serve(self) -> ForkWork | None:
        """Serve until it is idle or retired; in a fork, return the fork's work."""
        while self._listener or len(self._forks):
            listening = [self._listener] if self._listener else []
            waiting = [self._woken, *listening, *self._forks.connections()]
            for connection in _ready(waiting, self._rest_s()):
                if work := self._handle(connection):
                    return work
            if self._rest_s() == 0:
                self._retire()
        return None

    def _handle(self, ready: socket.socket) -> ForkWork | None:
        if ready is self._woken:
            self._woken.recv(4096)
            self._forks.reap()
            self._busy = time.monotonic()
        elif ready is self._listener:
            # A client that breaks off or sends nonsense must not affect the other clients.
            with contextlib.suppress(Exception), self._accept() as connection:
                return self._answer(connection)
        elif ready.fileno() >= 0:
            # `reap` may have closed this connection earlier in the same turn, as its process has ended.
            self._forks.read(ready)
        return None

    @contextlib.contextmanager
    def _accept(self) -> Iterator[socket.socket]:
        """Accept a client, whose connection is closed again unless a fork keeps it.

        Without a free descriptor the client is turned away, and starts cold: left in the queue, it would
        wait, and wake this process again and again.
        """
        assert self._listener
        try:
            connection, _ = self._listener.accept()
        except OSError:
            self._turn_away(self._listener)
            raise
        try:
            yield connection
        finally:
            if not self._forks.has(connection):
                connection.close()

    def _turn_away(self, listener: socket.socket) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with contextlib.suppress(OSError):
            listener.accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)

    def _rest_s(self) -> float | None:
        """Return how long it may still be idle, in seconds; None while it has forks."""
        if len(self._forks):
            return None
        return max(0.0, self._busy + self._options.idle_s - time.monotonic())

    def _retire(self) -> None:
        """Take no more requests, and end with the last fork."""
        if self._listener:
            self._path.unlink(missing_ok=True)
            self._listener.close()
            self._listener = None

    def _answer(self, connection: socket.socket) -> ForkWork | None:
        connection.settimeout(HANDSHAKE_S)
        if peer_user(connection) != os.getuid():
            return None
        request = receive(connection) or {}
        if request.get("kind") == "status":
            send(connection, **self._status())
        elif request.get("kind") == "off":
            self._retire()
            send(connection, pid=os.getpid(), jobs=len(self._forks))
        elif self._accepts(request, connection) and request["kind"] != "check":
            return self._fork(request, connection)
        return None

    def _accepts(self, request: Message, connection: socket.socket) -> bool:
        # After an upgrade, a fork would run old code with new files. The successor imports the new code.
        if change := self._preparation.change():
            send(connection, refused=f"{change} since it was imported", is_stale=True)
            self._retire()
            # `Forks.reap` waits for it: with an exit code set, Popen does not warn about a running child.
            spawn(self._options, self._preparation.before, self._directory).returncode = 0
            return False
        misfit = self._preparation.misfit(request)
        send(connection, refused=misfit, is_stale=False)
        return misfit is None

    def _fork(self, request: Message, connection: socket.socket) -> ForkWork | None:
        is_program = request["kind"] == "program"
        descriptors = receive_descriptors(connection)
        try:
            # With a full table of descriptors, the kernel drops those that do not fit.
            if len(descriptors) != len(request["descriptors"]) + (not is_program):
                return None
            pid = os.fork()
            if pid == 0:
                mine, descriptors = descriptors, []
                # The work runs outside of the server's loop, which suppresses the exceptions of clients.
                return functools.partial(self._become, request, mine, connection)
            self._forks.add(pid, Fork(connection, is_program))
            return None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _become(self, request: Message, descriptors: list[int], connection: socket.socket) -> None:
        self._leave(connection)
        adapt = self._preparation.adapt
        request["environ"] = adapt(request["environ"])
        request["runtime"] = self._options.runtime
        if request["kind"] == "program":
            become_program(request, descriptors, self._preparation.path)
        else:
            become_fork_server(request, descriptors, adapt)

    def _leave(self, connection: socket.socket) -> None:
        """Give up all that belongs to the server, in a fork."""
        # A signal of the fork must not wake the server, with which it shares the socket.
        signal.set_wakeup_fd(-1)
        if self._spare >= 0:
            os.close(self._spare)
        self._forks.forget()
        for opened in (connection, self._woken, self._wakes, self._listener):
            if opened:
                opened.close()

    def _status(self) -> Message:
        # Pss counts only this process's part of the pages that it shares with its forks.
        rollup = Path("/proc/self/smaps_rollup").read_text().split()
        return {
            "pid": os.getpid(),
            "age_s": round(time.monotonic() - self._started, 1),
            "memory_bytes": int(rollup[rollup.index("Pss:") + 1]) * 1024,
            "runtime": self._options.runtime,
            "modules": list(self._options.modules),
            "interpreter": sys.executable,
            "variables": self._preparation.variables(),
            "jobs_running": len(self._forks),
            "jobs_served": self._forks.served,
            "idle_end_s": self._options.idle_s,
            "stale": self._preparation.change(),
        }


def _ready(connections: Sequence[socket.socket], timeout_s: float | None) -> list[socket.socket]:
    """Return those with something to read, as `select.select` does up to descriptor 1023."""
    by_number = {connection.fileno(): connection for connection in connections}
    poll = select.poll()
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]
