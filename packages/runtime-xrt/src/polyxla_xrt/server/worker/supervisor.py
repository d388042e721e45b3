"""The worker's main process: it holds the port, and forks the processes that serve.

A program that waits for a dead replica can only be stopped by ending its process, and a broken program may
crash it. So the serving process is a fork that can be replaced at any time, while the user's process stays.
Where several jobs hold cores at once, each has another fork, which ends with it. The supervisor imports what
serving needs, once, and starts no thread, so that it can fork.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from polyxla import UsageError
from polyxla.plugin import update_environ
from polyxla_xrt.config.addresses import join_address
from polyxla_xrt.config.credentials import published
from polyxla_xrt.env import TF_CPP_MIN_LOG_LEVEL
from polyxla_xrt.server.worker import glibc_memory, process
from polyxla_xrt.server.worker.keeping import Keeper, Kept, KeptFile
from polyxla_xrt.server.worker.platforms.engines import Served
from polyxla_xrt.server.worker.platforms.slice_link import link_address
from polyxla_xrt.server.worker.process import REPLACE, UNOPENED, ServingOptions
from polyxla_xrt.server.worker.shared import begun

STOP_S = 6.0
"""Longest wait for the serving process to end after SIGTERM, in seconds; then it is killed."""
SHORT_LIFE_S = 5.0
"""A serving process that ends within this many seconds of its start counts as a failed start."""
MAX_FAILED_STARTS = 3
"""After this many failed starts in a row, the supervisor gives up."""
REOPEN_S = 120.0
"""How long a new serving process may find the devices occupied by the previous one, in seconds."""
REOPEN_POLL_S = 1.0
_MAX_REPORT_BYTES = 1 << 16
_MAX_LISTENERS = 64
_STOPPING = (signal.SIGTERM, signal.SIGINT)
_BLOCKED = (*_STOPPING, signal.SIGCHLD)

_log = logging.getLogger("polyxla.worker")


def supervise(
    serving: ServingOptions, environ: Mapping[str, str], ready: Callable[[str, Served], None]
) -> int:
    """Serve until a signal arrives or the serving process exits with 0; return the exit code.

    Args:
        serving: what to serve, and how; port 0 chooses a free port.
        environ: this process's environment.
        ready: called once with the address, when clients can connect.

    Raises:
        UsageError: the address cannot be bound, or the cores cannot be opened.
    """
    # jaxlib would log some fifty lines for each job. `import jax`, which workers do without, does the same.
    if TF_CPP_MIN_LOG_LEVEL not in environ:
        update_environ({TF_CPP_MIN_LOG_LEVEL: "1"})
    if serving.library is None:
        # This process imports it once for all processes that are forked from it.
        from polyxla_bridge.engine import jax_engine

        del jax_engine
    # Imported objects live as long as the process. Frozen, they are not scanned after each job, and no scan
    # writes to their pages, which would copy them.
    gc.collect()
    gc.freeze()
    # The serving process binds this port, and would be replaced again and again if it could not. Here, a port
    # that is taken is an error for the user.
    if serving.metrics_address:
        host, _, port = serving.metrics_address.rpartition(":")
        _try(host.strip("[]"), int(port), f"--metrics-address {serving.metrics_address}")
    host, _, port = serving.address.rpartition(":")
    with _hold(host.strip("[]"), int(port), f"--address {serving.address}") as held:
        address = join_address(host.strip("[]"), held.getsockname()[1])
        supervisor = _Supervisor(replace(serving, address=address), environ)
        with _published(serving, address, environ):
            try:
                return supervisor.run(lambda served: ready(address, served))
            finally:
                supervisor.end_jobs()


def _published(
    serving: ServingOptions, address: str, environ: Mapping[str, str]
) -> contextlib.AbstractContextManager[None]:
    """Let the user's clients, and the other workers of a slice, find the token if it is the worker's own."""
    if (token := serving.security.own_token) is None:
        return contextlib.nullcontext()
    members = serving.library.members if serving.library else None
    link = [link_address(members)] if members and members.own == 0 else []
    return published([address, *link], token, environ)


class _Supervisor:
    def __init__(self, serving: ServingOptions, environ: Mapping[str, str]) -> None:
        self._serving = serving
        self._environ = environ
        self._pid = 0
        self._is_stopping = False
        # These are the sockets of the last serving process: connections wait in them until the next process
        # serves.
        self._listeners: list[int] = []
        # The serving process orders the processes of jobs here, and gives what jobs have kept. It closes with
        # the serving process.
        self._orders: socket.socket | None = None
        self._jobs: set[int] = set()
        self._kept: Kept = {}
        # Both ends of the line on which signals arrive: this process reads the first.
        self._signals: tuple[socket.socket, ...] = ()

    def run(self, ready: Callable[[Served], None]) -> int:
        # Signals write to this line, which wakes the thread from its waits: one that arrives just before a
        # call that waits would not interrupt it.
        self._signals = socket.socketpair()
        woken, wakes = self._signals
        with woken, wakes:
            wakes.setblocking(False)
            signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
            try:
                return self._run(ready)
            finally:
                signal.set_wakeup_fd(-1)

    def _run(self, ready: Callable[[Served], None]) -> int:
        # The other end closes when this process ends, however it ends.
        alive, self._life = os.pipe()
        for number in _STOPPING:
            signal.signal(number, self._stop)
        signal.signal(signal.SIGCHLD, self._reap)
        failed_starts, served, ended = 0, None, time.monotonic()
        while True:
            started = time.monotonic()
            found = self._fork(alive, served)
            # The user is informed once: a replacement serves at the same address.
            if isinstance(found, Served) and served is None:
                ready(found)
                served = found
            if self._orders:
                self._take_orders(alive, self._orders)
            code = self._wait_for_end()
            if self._is_stopping or code == 0:
                return 0
            # Starting again would not correct what is wrong with the options.
            if isinstance(found, UsageError):
                raise found
            # The devices may still be occupied by the process that has just ended.
            if code == UNOPENED and time.monotonic() - ended < REOPEN_S:
                time.sleep(REOPEN_POLL_S)
                continue
            ended = time.monotonic()
            # A process that asks for its replacement has not failed, however short its life was.
            is_short = found is None or (ended - started < SHORT_LIFE_S and code != REPLACE)
            failed_starts = failed_starts + 1 if is_short else 0
            if failed_starts >= MAX_FAILED_STARTS:
                _log.error("the serving process failed %d times in a row, last with %d", failed_starts, code)
                return 1
            _log.warning("replacing the serving process", extra={"event": {"code": code}})

    def _wait_for_end(self) -> int:
        """Wait for the end of the serving process; return its exit code."""
        while True:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._pid = 0
                # Of `_stop`.
                signal.setitimer(signal.ITIMER_REAL, 0)
                return os.waitstatus_to_exitcode(status)
            # Its end is a signal, too.
            self._signals[0].recv(4096)

    def _receive(self, connection: socket.socket, files: int) -> tuple[bytes, list[int]]:
        """Wait for a message and its files; return nothing if the other end was closed."""
        while connection not in select.select([connection, self._signals[0]], [], [])[0]:
            self._signals[0].recv(4096)
        text, found, _, _ = socket.recv_fds(connection, _MAX_REPORT_BYTES, files)
        return text, found

    def end_jobs(self) -> None:
        """Kill the processes of jobs. They end with this process, but one that has stopped would stay."""
        for pid in list(self._jobs):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _fork(self, alive: int, before: Served | None) -> Served | UsageError | None:
        """Fork a serving process; return what it serves or why it cannot, or None if it died before that."""
        # SOCK_SEQPACKET keeps message boundaries: one message has the whole report and its file descriptors.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = None
        if self._serving.max_jobs > 1 or self._serving.keep_s:
            self._orders, order = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with _signals_blocked():
            self._pid = os.fork()
            if self._pid == 0:
                ours.close()
                self._become(alive, lambda: self._serve(theirs, order, before))
        if self._is_stopping:
            # The signal came before there was a child to pass it on to.
            self._stop()
        # The child holds the only other ends now: the wait ends when it is ready, or dead.
        theirs.close()
        if order:
            order.close()
        with ours:
            report, found = self._receive(ours, _MAX_LISTENERS)
        if found:
            # The new process listens already, so no client finds the port closed in between.
            turn_away(self._listeners)
            self._listeners = found
        result: Served | UsageError | None = pickle.loads(report) if report else None
        return result

    def _take_orders(self, alive: int, orders: socket.socket) -> None:
        """Do what the serving process orders, until it has ended."""
        with orders:
            while True:
                text, files = self._receive(orders, 1)
                if not text:
                    break
                match pickle.loads(text):
                    case ServingOptions() as serving:
                        with socket.socket(fileno=files[0]) as line:
                            self._fork_job(alive, serving, line)
                    case file:
                        if (before := self._kept.pop(file, None)) is not None:
                            os.close(before)
                        if files:
                            self._kept[file] = files[0]
        self._orders = None

    def _fork_job(self, alive: int, serving: ServingOptions, line: socket.socket) -> None:
        with _signals_blocked():
            pid = os.fork()
            if pid == 0:
                # What is kept is freed when no process has it.
                for number in self._kept.values():
                    os.close(number)
                self._become(alive, lambda: self._serve_job(serving, line))
            self._jobs.add(pid)

    def _become(self, alive: int, serve: Callable[[], int]) -> NoReturn:
        """Make this process, which was just forked, one that serves, and end it."""
        code = 1
        try:
            # With its own copy of `_life` the child would never see the supervisor end. Copies of the
            # listeners would stay open after `turn_away`, and the kernel would send connections to them that
            # nobody accepts.
            for number in (self._life, *self._listeners):
                os.close(number)
            if self._orders:
                self._orders.close()
            signal.set_wakeup_fd(-1)
            for end in self._signals:
                end.close()
            # A terminal sends Ctrl-C to both processes; the supervisor decides and sends SIGTERM.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for inherited in (signal.SIGTERM, signal.SIGCHLD):
                signal.signal(inherited, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
            # This must precede all threads, which would otherwise get arenas of their own.
            glibc_memory.share_arena()
            _end_with_supervisor(alive)
            code = serve()
        except Exception:
            _log.exception("the serving process failed")
        finally:
            process.end_with(code)

    def _serve(self, ready: socket.socket, orders: socket.socket | None, before: Served | None) -> int:
        try:
            engines = process.open_engines(self._serving, self._environ, before)
            port = int(self._serving.address.rpartition(":")[2])
            fork, keeper = None, None
            if orders and self._serving.max_jobs > 1:
                fork = partial(_order_job, orders)
            if orders and self._serving.keep_s:
                limit = self._serving.limit_bytes(engines.served)
                keeper = Keeper(self._serving.keep_s, limit, self._kept, partial(_order, orders))
            return process.serve(
                self._serving,
                engines,
                lambda _: _report(ready, engines.served, own_listeners(port)),
                fork,
                keeper=keeper,
            )
        # The parent raises it: only there can the command line print it and choose the exit code.
        except UsageError as error:
            _report(ready, error)
            return 1

    def _serve_job(self, serving: ServingOptions, line: socket.socket) -> int:
        host, _, port = serving.address.rpartition(":")
        if port != "0":
            try:
                _try(host.strip("[]"), int(port), "--job-ports")
            except UsageError as error:
                _log.info("%s", error.what)
                return 1
        engines = process.open_engines(serving, self._environ)
        return process.serve(serving, engines, lambda port: line.send(begun(port)), line=line)

    def _reap(self, *_: object) -> None:
        for pid in list(self._jobs):
            # The serving process is waited for elsewhere. A signal that arrives within this handler runs it
            # again, which then waits for this job.
            with contextlib.suppress(ChildProcessError):
                if not os.waitpid(pid, os.WNOHANG)[0]:
                    continue
            self._jobs.discard(pid)

    def _stop(self, *_: object) -> None:
        self._is_stopping = True
        if self._kill(signal.SIGTERM):
            # SIGKILL follows if the process ignores SIGTERM.
            signal.signal(signal.SIGALRM, lambda *_: self._kill(signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, STOP_S)

    def _kill(self, number: int) -> bool:
        # A pid of 0 would signal the whole process group.
        if not self._pid:
            return False
        try:
            os.kill(self._pid, number)
        except ProcessLookupError:
            # `run` has reaped the process and not yet forgotten its pid.
            return False
        return True


def _end_with_supervisor(alive: int) -> None:
    """End this process, the serving one, when the supervisor has closed its end of the pipe."""

    def wait() -> None:
        select.select([alive], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="polyxla-supervisor", daemon=True).start()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Hold back signals around a fork.

    They wait until this process knows the child, to pass them on, and until the child has replaced the
    supervisor's handlers.
    """
    # The child would inherit text in the buffers and print it a second time.
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)


def _order(orders: socket.socket, what: ServingOptions | KeptFile, file: int | None) -> None:
    """Order something from the supervisor, with a file's descriptor."""
    socket.send_fds(orders, [pickle.dumps(what)], [] if file is None else [file])


def _order_job(orders: socket.socket, serving: ServingOptions) -> socket.socket:
    """Order the process of a job; return the line to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        _order(orders, serving, theirs.fileno())
    return ours


def _report(to: socket.socket, found: Served | UsageError, files: Sequence[int] = ()) -> None:
    with to:
        socket.send_fds(to, [pickle.dumps(found)], files)


def _hold(host: str, port: int, option: str) -> socket.socket:
    """Bind the port without listening: it stays this worker's while serving processes are replaced.

    Raises:
        UsageError: the port is taken, or the host is not an address of this machine.
    """
    # `_try` has bound the port without sharing it, so nobody listens there. Between the two calls, only a
    # process that also sets SO_REUSEPORT could bind it, such as another worker.
    family, where = _try(host, port, option)
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(where)
    return held


def _try(host: str, port: int, option: str) -> tuple[socket.AddressFamily, Any]:
    """Bind a port for a moment without SO_REUSEPORT, which would succeed beside another worker."""
    try:
        family, kind, number, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            return family, probe.getsockname()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise UsageError(
            f"cannot listen on {join_address(host, port)}: {error.strerror}",
            where=option,
            fix="Find the process that holds the port with: ss -ltnp; or choose another port."
            if taken
            else "Write a name or address of this host, such as 127.0.0.1:8470.",
        ) from None


def own_listeners(port: int) -> list[int]:
    """Return the file descriptors of this process's sockets that listen on a TCP port.

    Args:
        port: the port.
    """
    # gRPC opens the sockets and does not reveal them, so they are found among all open files.
    numbers = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    return [number for number in numbers if _listens(number, port)]


def _listens(number: int, port: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(number)) as found:
            is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
            accepts = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return bool(is_tcp and accepts and found.getsockname()[1] == port)
    except OSError:
        # The file is of another kind, or was closed after the listing, as the directory itself was.
        return False


def turn_away(listeners: Sequence[int]) -> None:
    """Close the connections that wait in sockets whose process has ended, and the sockets.

    Their clients connect again, and reach the process that listens now.

    Args:
        listeners: file descriptors of the sockets.
    """
    for number in listeners:
        with socket.socket(fileno=number) as listener:
            # `accept` must fail when no connection waits any more, instead of waiting for the next.
            listener.setblocking(False)
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()
