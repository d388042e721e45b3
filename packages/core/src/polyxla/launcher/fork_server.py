"""The fork server's own process: import once, fork on request, report how each process ends.

It has one thread, and nothing runs in it that would start another, since only the forking thread survives
in a fork. It ends with the launching process, or when it has been idle for `IDLE_S`.

The launching process sends a number, and with it the descriptors of a pipe that the new process serves and
of its standard output and error, whose numbers follow. The server answers with the number and the process id,
and once more with exit code and peak memory in bytes when the process has ended. Each message is a JSON list.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import NoReturn

from polyxla import env
from polyxla.launcher import child

IDLE_S = 300.0
"""Time without a launch after which the server ends and frees its memory, in seconds."""


def main() -> None:
    """Serve the socket whose descriptor is the second argument."""
    (number,) = json.loads(sys.argv[2])
    control = socket.socket(fileno=number)
    leave_interrupts()
    # What imports set in the environment belongs to every fork, whose environment replaces this one.
    before = env.snapshot()
    # Nothing that is imported is garbage, and what the collector touches later would be copied in each fork.
    gc.disable()
    with _ending_with(control):
        for name in json.loads(sys.argv[3]):
            importlib.import_module(name)
    child.remove_remote_modules()
    gc.freeze()
    gc.enable()
    serve(control, functools.partial(merged, before, env.snapshot()))


def leave_interrupts() -> None:
    """Make Ctrl-C do nothing here: it reaches every process of the group, and the launching one decides."""
    # Use a handler: SIG_IGN would tell the forks that the launching process ignores it.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextlib.contextmanager
def _ending_with(control: socket.socket) -> Iterator[None]:
    """End this process if the launching process ends during imports, which take up to half a minute."""
    woken, wakes = socket.socketpair()

    def watch() -> None:
        poll = select.poll()
        # Only for its end: requests wait until the imports are done.
        poll.register(control, 0)
        poll.register(woken, select.POLLIN)
        if control.fileno() in dict(poll.poll()):
            os._exit(0)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        # A fork has only the forking thread, and would wait forever for a lock that this one holds.
        wakes.send(b"\0")
        thread.join()
        woken.close()
        wakes.close()


def serve(control: socket.socket, adapt: Callable[[dict[str, str]], dict[str, str]]) -> NoReturn:
    """Be the fork server after its imports; in a replica's process, do its work, then end.

    `adapt` turns the environment that the launching process sends for a replica into the replica's.
    """
    # Kept until the end: its sockets are closed with this process, and by none of its forks.
    server = _Server(control)
    pipe = server.serve()
    if pipe is None:
        # Nothing here needs an orderly exit, which would take time.
        os._exit(0)
    child.serve(pipe, adapt)
    child.end_process(0)


def merged(before: Mapping[str, str], after: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Return the environment `wanted`, with what imports have set in theirs, unless it has another value."""
    imported = {name: value for name, value in after.items() if before.get(name) != value}
    kept = {name: value for name, value in imported.items() if wanted.get(name) == before.get(name)}
    return {**wanted, **kept}


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._numbers: dict[int, int] = {}
        # SIGCHLD writes to this socket, which wakes the thread from `poll`.
        self._woken, wakes = socket.socketpair()
        wakes.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Sent to the whole group, they are for the launching process and the replicas, which may save first.
        self._handlers = {
            ignored: signal.signal(ignored, signal.SIG_IGN) for ignored in (signal.SIGTERM, signal.SIGHUP)
        }
        self._inherited = [control, self._woken, wakes]

    def serve(self) -> Connection | None:
        """Serve requests until the launching process ends or none arrive; in a fork, return its pipe."""
        requested = time.monotonic()
        # Not `select`, which takes descriptors below 1024 only: this process has the launching one's number.
        poll = select.poll()
        for source in (self._control, self._woken):
            poll.register(source, select.POLLIN)
        while self._numbers or time.monotonic() < requested + IDLE_S:
            # It never ends before its forks: it must report how each of them ended.
            wait_s = None if self._numbers else max(0.0, requested + IDLE_S - time.monotonic())
            ready = dict(poll.poll(None if wait_s is None else 1000 * wait_s))
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
                self._reap()
            if self._control.fileno() in ready:
                requested = time.monotonic()
                data = b""
                # Reset: the launching process was killed before it read a report.
                with contextlib.suppress(ConnectionResetError):
                    data, descriptors, _, _ = socket.recv_fds(self._control, 4096, 3)
                if not data:
                    return None
                number, *outputs = json.loads(data)
                pipe, *received = descriptors
                if served := self._fork(number, Connection(pipe), dict(zip(outputs, received, strict=True))):
                    return served
        return None

    def _fork(self, number: int, pipe: Connection, outputs: dict[int, int]) -> Connection | None:
        pid = os.fork()
        if pid == 0:
            # The fork shares the server's socket, which its own signals must not wake.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for ignored, handler in self._handlers.items():
                signal.signal(ignored, handler)
            child.leave_interrupts_to_launcher()
            for inherited in self._inherited:
                inherited.close()
            for output, received in outputs.items():
                os.dup2(received, output)
                os.close(received)
            if isinstance(sys.stdout, io.TextIOWrapper):
                # Python has chosen it by what the server's was.
                sys.stdout.reconfigure(line_buffering=os.isatty(1))
            return pipe
        # Only the fork may hold the pipe, or it would not close with its process.
        pipe.close()
        for received in outputs.values():
            os.close(received)
        self._numbers[pid] = number
        # Reported at once: until then the launching process can signal this server only.
        self._report(number, pid)
        return None

    def _reap(self) -> None:
        while self._numbers:
            # SIGCHLD is sent once for several ends, so all that have ended are reaped.
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            self._report(
                self._numbers.pop(pid), pid, os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024
            )

    def _report(self, *values: int) -> None:
        # A launching process that is gone needs no report; its children end by themselves.
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(values).encode())
