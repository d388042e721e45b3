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
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyxla import PolyxlaError, env
from polyxla_warm import messages
from polyxla_warm.directory import new_socket
from polyxla_warm.jobs import Job, Jobs
from polyxla_warm.messages import Message
from polyxla_warm.preparation import Preparation, prepare
from polyxla_warm.program import become_fork_server, become_program
from polyxla_warm.starting import Options, spawn

HANDSHAKE_S = 2.0
"""Longest wait for each part of a client's request, in seconds: others wait meanwhile."""
Work = Callable[[], None]


def main() -> None:
    """Prepare, by the options in the first argument, and serve; in a fork, be what the client asked for."""
    options = Options(**json.loads(sys.argv[1]))
    directory = str(Path.cwd())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        preparation = prepare(options)
        path = new_socket(env.snapshot(), os.getpid())
        server = Server(preparation, options, path, directory)
    except Exception as error:
        problem = str(error) if isinstance(error, PolyxlaError) else f"{type(error).__name__}: {error}"
        _answer(options, problem=problem)
        sys.exit(1)
    _answer(options, pid=os.getpid())
    work = server.serve()
    if work is None:
        # Nothing here needs an orderly exit, which would take time.
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
        directory: in which it was started, and its successor is.
    """

    def __init__(self, preparation: Preparation, options: Options, path: Path, directory: str) -> None:
        self._preparation = preparation
        self._options = replace(options, ready=-1)
        self._directory = directory
        self._path = path
        self._started = self._busy = time.monotonic()
        self._jobs = Jobs()
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        # SIGCHLD writes to this socket, which wakes the thread from `select`.
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        os.chdir("/")
        # Collected objects would be copied in every fork.
        gc.collect()
        gc.freeze()

    def serve(self) -> Work | None:
        """Serve until it is idle or retired; in a fork, return the fork's work."""
        while self._listener or len(self._jobs):
            listening = [self._listener] if self._listener else []
            waiting = [self._woken, *listening, *self._jobs.connections()]
            ready, _, _ = select.select(waiting, [], [], self._rest_s())
            for one in ready:
                if work := self._handle(one):
                    return work
            if self._rest_s() == 0:
                self._retire()
        return None

    def _handle(self, ready: socket.socket) -> Work | None:
        if ready is self._woken:
            self._woken.recv(4096)
            self._jobs.reap()
            self._busy = time.monotonic()
        elif ready is self._listener:
            connection, _ = self._listener.accept()
            # A client that breaks off, or is not this user's, is no concern of the others.
            with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
                return self._answer(connection)
        elif ready.fileno() >= 0:
            self._jobs.read(ready)
        return None

    def _rest_s(self) -> float | None:
        """Return how long it may still be idle, in seconds; None while it has jobs."""
        if len(self._jobs):
            return None
        return max(0.0, self._busy + self._options.idle_s - time.monotonic())

    def _retire(self) -> None:
        """Take no more requests, and end with the last job."""
        if self._listener:
            self._path.unlink(missing_ok=True)
            self._listener.close()
            self._listener = None

    def _answer(self, connection: socket.socket) -> Work | None:
        connection.settimeout(HANDSHAKE_S)
        if messages.peer_user(connection) != os.getuid():
            connection.close()
            return None
        request = messages.receive(connection) or {}
        if request.get("kind") == "status":
            messages.send(connection, **self._status())
        elif request.get("kind") == "off":
            self._retire()
            messages.send(connection, pid=os.getpid(), jobs=len(self._jobs))
        elif self._accepts(request, connection) and request["kind"] != "check":
            descriptors = messages.receive_descriptors(connection)
            if len(descriptors) == len(request["descriptors"]) + (request["kind"] == "fork_server"):
                return self._fork(request, descriptors, connection)
        connection.close()
        return None

    def _accepts(self, request: Message, connection: socket.socket) -> bool:
        if change := self._preparation.change():
            messages.send(connection, refused=f"{change} since it was imported", is_stale=True)
            self._retire()
            # Reaped with the jobs.
            spawn(self._options, self._preparation.before, self._directory).returncode = 0
            return False
        misfit = self._preparation.misfit(request)
        messages.send(connection, refused=misfit, is_stale=False)
        return misfit is None

    def _fork(self, request: Message, descriptors: list[int], connection: socket.socket) -> Work | None:
        is_program = request["kind"] == "program"
        pid = os.fork()
        if pid == 0:
            self._leave(connection)
            adapt = self._preparation.adapt
            request["environ"] = adapt(request["environ"])
            request["runtime"] = self._options.runtime
            if is_program:
                return functools.partial(become_program, request, descriptors, self._preparation.path)
            return functools.partial(become_fork_server, request, descriptors, adapt)
        for one in descriptors:
            os.close(one)
        self._jobs.add(pid, Job(connection, is_program))
        return None

    def _leave(self, connection: socket.socket) -> None:
        """Be no server any more, in a fork."""
        signal.set_wakeup_fd(-1)
        self._jobs.forget()
        for one in (connection, self._woken, self._wakes, self._listener):
            if one:
                one.close()

    def _status(self) -> Message:
        rollup = Path("/proc/self/smaps_rollup").read_text().split()
        return {
            "pid": os.getpid(),
            "age_s": round(time.monotonic() - self._started, 1),
            "memory_bytes": int(rollup[rollup.index("Pss:") + 1]) * 1024,
            "runtime": self._options.runtime,
            "modules": list(self._options.modules),
            "interpreter": sys.executable,
            "variables": self._preparation.variables(),
            "jobs_running": len(self._jobs),
            "jobs_served": self._jobs.served,
            "idle_end_s": self._options.idle_s,
            "stale": self._preparation.change(),
        }
