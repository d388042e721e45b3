"""Filling the library's function table when a framework opens it, and emptying it when the program ends."""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from polyxla_bridge import native
from polyxla_bridge.env import TORCHELASTIC_USE_AGENT_STORE, chooses_kept_memory, own_environ
from polyxla_bridge.errors import as_pjrt_error
from polyxla_bridge.table.handles import Bridge
from polyxla_bridge.table.table import Table

if TYPE_CHECKING:
    from polyxla_bridge.engine.engine import Engine

FINISH_TIMEOUT_S = 60.0
"""Longest wait for the devices to finish when the program ends, in seconds."""
FAILED_TIMEOUT_S = 5.0
"""Longest wait for the devices after an exception, in seconds. It is short, because the queued programs may
wait for processes that wait for this one."""
RETURN_TIMEOUT_S = 12.0
"""Longest wait of a process that has succeeded for the others to return, in seconds. A stall watchdog needs
half of it to report that its replica waits for this process."""
OTHERS_TIMEOUT_S = 300.0
"""Longest wait of a process that serves the others for them to end first, in seconds."""
KEPT_BYTES = 1 << 30
"""Freed memory that glibc keeps, in bytes, and size of the largest array that may take it."""
ARENA_BYTES = 64 << 20
"""Size of the pieces in which an arena of another thread than the main one grows and shrinks, in bytes.
Source: HEAP_MAX_SIZE in glibc's arena.c."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
"""Source: glibc's malloc.h."""
FAILED = 1
"""Exit code of a process that an exception has ended, or whose last step failed after the program's end."""
UNFINISHED = 4
"""Exit code of a process whose devices did not finish, or could not be released."""
_active = threading.Lock()
_has_client = threading.Event()
_log = logging.getLogger("polyxla.bridge")


class Opener:
    """The framework that opened the library; this one needs nothing when the program ends.

    Attributes:
        has_late_objects: whether the interpreter's last garbage collections must not destroy its objects.
    """

    has_late_objects = True

    def wait(self) -> None:
        """Wait until all work is submitted to the devices.

        Raises:
            RuntimeError: some of it failed.
        """

    def release(self) -> None:
        """Release the framework's objects; the devices are released next."""

    def before_client(self) -> None:
        """Prepare for the client, which is about to be created, once in this process or in a fork of it."""

    def after_client(self, engine: Engine) -> None:
        """Prepare for programs; `engine` is the client's."""


def activate(make_engine: Callable[[], Engine], opener: Callable[[], Opener] = Opener) -> None:
    """Fill the library's function table, and register the exit function; a second call does nothing.

    At exit, the framework first releases its objects, then the engine is closed, then the table is disabled:
    C++ objects that are destroyed later call functions that do nothing. After an exception, the framework is
    not released: the engine is closed, and the process ends at once, without finalising Python.

    Args:
        make_engine: called when the framework creates its client.
        opener: makes the framework's part; called once.
    """
    # The lock serves as a flag: it is never released, so exactly one call gets past it.
    if not _active.acquire(blocking=False):
        return
    _keep_freed_memory()
    framework = opener()

    def make() -> Engine:
        # The framework prepares here, not in `activate`: until its client exists, the process may be forked,
        # and the fork makes a client of its own.
        framework.before_client()
        engine = make_engine()
        framework.after_client(engine)
        _has_client.set()
        return engine

    bridge = Bridge(make, framework.wait)
    table = Table(bridge)
    native.LOCKED.polyxla_set_api(ctypes.addressof(table.api))
    atexit.register(_leave, framework, bridge, table)
    # Python calls this before it waits for the program's threads, and calls the exit functions after that. So
    # the main thread has registered all of its own when `_before_exit` registers another.
    threading._register_atexit(_before_exit, bridge, table)  # type: ignore[attr-defined]  # noqa: SLF001


def _keep_freed_memory() -> None:
    """Let glibc keep freed memory, which the arrays of the next step need again.

    By default it returns what a step has freed to the kernel, which maps and zeroes it anew in the next step:
    a fifth of a step's time.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    # Other C libraries have no such call, and a user's choice takes precedence.
    if option is not None and not chooses_kept_memory(own_environ()):
        # Only the main thread's arena has room for an array of more than 64 MiB.
        option(_M_ARENA_MAX, 1)
        # An arena that a thread has made before keeps its last 64 MiB, too.
        option(_M_TOP_PAD, ARENA_BYTES)
        option(_M_MMAP_THRESHOLD, KEPT_BYTES)
        option(_M_TRIM_THRESHOLD, KEPT_BYTES)


def is_active() -> bool:
    """Return whether a framework has opened the library in this process, and not another one in its place."""
    return _active.locked()


def has_client() -> bool:
    """Return whether the framework has created its client, here or in a process of which this is a fork."""
    return _has_client.is_set()


def _leave(framework: Opener, bridge: Bridge, table: Table) -> None:
    # The devices finish first: a framework's release may wait for them with the GIL held, and executions need
    # the GIL.
    try:
        is_finished = bridge.finish(FINISH_TIMEOUT_S)
    except RuntimeError:
        # An exception in an exit function would not change the exit code, so the process ends here.
        _log.exception("a step that was still running when the program ended has failed")
        _end(FAILED)
    if not is_finished:
        late = f"the devices had not finished {FINISH_TIMEOUT_S:g} s after the end of the program"
        sys.stderr.write(f"polyxla: {late}; the process ends without waiting any longer\n")
        _end(UNFINISHED)
    framework.release()
    try:
        # Stay before closing: a closed connection would fail the collective of a replica that waits for this
        # process, before its watchdog can report the reason.
        bridge.stay(RETURN_TIMEOUT_S)
        bridge.close(others_s=OTHERS_TIMEOUT_S if _serves_others() else 0)
    except Exception as error:
        sys.stderr.write(f"polyxla: {as_pjrt_error(error).message}\n")
        # The process ends without finalising Python, because the engine's threads may still run C++ code.
        _end(UNFINISHED)
    table.silence()
    # The interpreter's last garbage collections would otherwise destroy, in any order, C++ objects whose
    # clients no longer exist.
    if framework.has_late_objects:
        gc.freeze()


def _before_exit(bridge: Bridge, table: Table) -> None:
    if _has_ended_by_exception():
        # The function that is registered last is called first: it must come before `_leave`, which would wait
        # for the devices and release the framework.
        atexit.register(_leave_at_once, bridge, table)


def _has_ended_by_exception() -> bool:
    """Return whether an uncaught exception has ended the program.

    ``sys.last_traceback`` may also belong to a failed test or to an input of an interactive session.
    """
    traceback = getattr(sys, "last_traceback", None)
    # Only the frame in which Python started has no caller. An input of an interactive session runs in such a
    # frame, too, but only there `sys.ps1` exists.
    return traceback is not None and traceback.tb_frame.f_back is None and not hasattr(sys, "ps1")


def _serves_others() -> bool:
    """Return whether other processes may need this one until they end: torch.distributed's store is in it.

    Under torchrun, the store is in torchrun's own process.
    """
    # Check sys.modules: a program that has not imported torch.distributed has no store.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return own_environ().get(TORCHELASTIC_USE_AGENT_STORE) != "True"


def _leave_at_once(bridge: Bridge, table: Table) -> None:
    """Call the other exit functions, and end the process while Python still works.

    The framework's threads go on, and its release would wait for them: the queued programs may wait for other
    processes, which may wait for this one. When Python is finalised, a C++ thread that calls it is ended, and
    the process with it (signal 6).
    """
    # `_leave` would wait for the devices, and this function would call itself.
    for function in (_leave_at_once, _leave):
        atexit.unregister(function)
    atexit._run_exitfuncs()  # noqa: SLF001
    # Once the engine is closed, the calls of the framework's threads fail. They then wait for the end of the
    # process, so that the program's own exception stays the last that the user reads.
    table.holds_failures = True
    try:
        # Closing tells the job's other processes that this one has returned.
        bridge.close(FAILED_TIMEOUT_S)
    finally:
        if isinstance(sys.last_value, KeyboardInterrupt):
            # Python itself ends in this way after Ctrl-C, so that a shell sees the signal in the exit status.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        _end(FAILED)


def _end(code: int) -> None:
    # Python flushes its streams only after the exit functions, one of which calls this.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
