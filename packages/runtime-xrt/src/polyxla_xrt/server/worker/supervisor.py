"""The process that a person starts: it holds the port, and has another one serve.

A program that waits for a dead replica cannot be stopped but with its process, and a broken one may end
its process. So the serving process is a fork that can be replaced at any time: whoever starts a worker
sees one that stays. This process imports what serving needs, once, and starts no thread.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from polyxla import UsageError
from polyxla_xrt.config.addresses import join_address
from polyxla_xrt.server import engines, worker_process
from polyxla_xrt.server.worker.process import REPLACE, ServingOptions

STOP_S = 6.0
"""How long the serving process may take to end, in seconds."""
SOON_S = 5.0
"""One that ends by itself within so many seconds of its start is not worth replacing for ever."""
TRIES = 3
_STOPPING = (signal.SIGTERM, signal.SIGINT)

_log = logging.getLogger("polyxla.worker")


def supervise(serving: ServingOptions, environ: Mapping[str, str], ready: Callable[[str], None]) -> int:
    """Serve until a signal or the serving process's own wish; return the exit code.

    Args:
        serving: what and how; port 0 for any that is free.
        environ: this process's environment.
        ready: called once, with the address, when clients can come.

    Raises:
        UsageError: the address cannot be had.
    """
    # Once, here, for all the processes that are forked from this one.
    from polyxla_bridge.engine import jax_engine

    del jax_engine
    # What is there already stays: it need not be looked at after every job, nor copied for that.
    gc.collect()
    gc.freeze()
    if serving.metrics_address:
        host, _, port = serving.metrics_address.rpartition(":")
        _try(host.strip("[]"), int(port), f"--metrics-address {serving.metrics_address}")
    host, _, port = serving.address.rpartition(":")
    with _hold(host.strip("[]"), int(port), f"--address {serving.address}") as held:
        address = join_address(host.strip("[]"), held.getsockname()[1])
        return _Supervisor(replace(serving, address=address), environ).run(lambda: ready(address))


class _Supervisor:
    def __init__(self, serving: ServingOptions, environ: Mapping[str, str]) -> None:
        self._serving = serving
        self._environ = environ
        self._pid = 0
        self._is_stopping = False

    def run(self, ready: Callable[[], None]) -> int:
        # Its other end closes with this process, however that ends.
        alive, self._life = os.pipe()
        for number in _STOPPING:
            signal.signal(number, self._stop)
        short, is_ready = 0, False
        while True:
            started = time.monotonic()
            if self._fork(alive) and not is_ready:
                ready()
                is_ready = True
            code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            if self._is_stopping or code == 0:
                return 0
            short = short + 1 if time.monotonic() - started < SOON_S and code != REPLACE else 0
            if short >= TRIES:
                _log.error("the serving process ended %d times at once, the last time by %d", TRIES, code)
                return 1
            _log.warning("the serving process is replaced", extra={"event": {"code": code}})

    def _fork(self, alive: int) -> bool:
        """Have a process serve; return whether it came so far."""
        told, tell = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal waits until this process knows whom to pass it on to, and the other is nobody's supervisor.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        self._pid = os.fork()
        if self._pid == 0:
            os.close(told)
            os.close(self._life)
            self._serve(alive, tell)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
        if self._is_stopping:
            # It was asked for while there was nobody to tell.
            self._stop()
        os.close(tell)
        with os.fdopen(told, "rb") as pipe:
            return bool(pipe.read(1))

    def _serve(self, alive: int, tell: int) -> None:
        code = 1
        try:
            # A terminal's Ctrl-C goes to both; the supervisor says what is to be done.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
            _end_with_the_supervisor(alive)
            engines.share_memory()
            code = worker_process.serve(self._serving, self._environ, lambda: _tell(tell))
        except Exception:
            _log.exception("the serving process failed")
        finally:
            worker_process.end_with(code)

    def _stop(self, *_: object) -> None:
        self._is_stopping = True
        # 0 would be every process of this one's group.
        if self._pid and self._kill(signal.SIGTERM):
            # If that is not heard, this is.
            signal.signal(signal.SIGALRM, lambda *_: self._kill(signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, STOP_S)

    def _kill(self, number: int) -> bool:
        try:
            os.kill(self._pid, number)
        except ProcessLookupError:
            return False
        return True


def _end_with_the_supervisor(alive: int) -> None:
    import threading

    def wait() -> None:
        select.select([alive], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="polyxla-supervisor", daemon=True).start()


def _tell(pipe: int) -> None:
    os.write(pipe, b"1")
    os.close(pipe)


def _hold(host: str, port: int, option: str) -> socket.socket:
    """Bind the port without listening, so that it stays this worker's whichever process serves.

    Raises:
        UsageError: it is another's, or no address of this host.
    """
    # Between the two another worker could only get in by using this very port, too.
    family, where = _try(host, port, option)
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(where)
    return held


def _try(host: str, port: int, option: str) -> tuple[socket.AddressFamily, Any]:
    """Bind a port for a moment, without sharing it: a worker that is there would share its clients, too."""
    try:
        family, kind, number, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            return family, probe.getsockname()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise UsageError(
            f"nothing can be served at {join_address(host, port)}: {error.strerror}",
            where=option,
            fix="See who has the port with: ss -ltnp; or choose another one."
            if taken
            else "Give a name or address of this host, such as 127.0.0.1:8470.",
        ) from None
