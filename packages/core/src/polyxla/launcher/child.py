"""The replica process's side of `polyxla.launcher.processes`: receive one job, run it, answer once, end."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import io
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import cloudpickle

from polyxla import env, tracebacks
from polyxla.console import say
from polyxla.errors import ReplicaLostError
from polyxla.launcher import (
    failures,
)
from polyxla.launcher.messages import Message, Raised, Returned, Setup, pack

REPLICA_THREAD = "polyxla-replica"
"""Prefix of the name of each thread that is a replica."""
_is_interrupted = threading.Event()
_has_answered = threading.Event()
_interrupt_handlers: dict[threading.Thread, Callable[[], object]] = {}
"""What takes a Ctrl-C in the place of the replica that is this thread."""


_FILES = io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom
FLUSH_FAILED = 120
"""Exit code of a process whose output could not be written. Source: Python's ``Py_FinalizeEx``."""


def main() -> None:
    """Serve the pipe whose descriptor is the second argument, then end."""
    leave_interrupts_to_launcher()
    (number,) = json.loads(sys.argv[2])
    serve(Connection(number))


def leave_interrupts_to_launcher() -> None:
    """Make Ctrl-C, which a terminal sends to every process of the group, do nothing in this one.

    The launching process decides, and passes it on. Processes that the replica starts are interrupted as
    usual, unless the launching process ignores Ctrl-C.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Use a handler: SIG_IGN would be inherited by the programs that a replica starts.
        signal.signal(signal.SIGINT, _take_interrupt)
        # Loaders' workers are forks.
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _take_interrupt(*_: object) -> None:
    if _is_interrupted.is_set():
        raise KeyboardInterrupt


@contextlib.contextmanager
def on_interrupt(handle: Callable[[], object]) -> Iterator[bool]:
    """Within the block, let a Ctrl-C call `handle` instead of interrupting the replica that is this thread.

    The replica then has `polyxla.launcher.failures.TERMINATION_GRACE_S` to save and end; a second Ctrl-C ends
    its process.

    Args:
        handle: called once, in another thread.

    Yields:
        Whether it may be called: only in a process that a launch started. In any other, Ctrl-C is a signal
        that the program handles itself.
    """
    own = threading.current_thread()
    _interrupt_handlers[own] = handle
    try:
        yield failures.has_parent()
    finally:
        _interrupt_handlers.pop(own, None)


def interrupt() -> bool:
    """Interrupt the replicas of this process: by their handlers, or else by KeyboardInterrupt in each.

    Their ``finally`` blocks run. Returns whether there was a handler.
    """
    if _has_answered.is_set():
        # The request and the answer have crossed: exit functions run now, which are not to be broken off.
        return False
    replicas = _replica_threads()
    has_handled = False
    for thread in replicas or [threading.main_thread()]:
        if handle := _interrupt_handlers.pop(thread, None):
            try:
                handle()
            except Exception as error:
                # On a full disk, for example. This thread must go on: the launching process relies on it.
                say(f"Ctrl-C cannot be handled by the program, and interrupts it: {error}")
            else:
                has_handled = True
                continue
        _is_interrupted.set()
        if replicas:
            # It takes effect once the thread runs Python again.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
            )
        else:
            # A signal, because it ends a sleep too.
            signal.pthread_kill(thread.ident or 0, signal.SIGINT)
    return has_handled


def _record_signals() -> int:
    """Return a descriptor from which the numbers of the signals are read that this process handles."""
    received, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    # Loaders' workers are forks, whose signals are not this process's.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    return received


def _take_signal(received: int, number: int) -> None:
    """Take a signal that the launching process passes on, unless it was sent to this process as well.

    `received` is the descriptor of `_record_signals`. A program may save at the first signal, and end at the
    second.
    """
    with contextlib.suppress(BlockingIOError):
        if number in os.read(received, 4096):
            return
    os.kill(os.getpid(), number)


def serve(pipe: Connection, adapt: Callable[[dict[str, str]], dict[str, str]] = dict) -> None:
    """Run the child: receive environment and work, run the work, send one answer.

    Args:
        pipe: the child's end.
        adapt: turns the environment that the launching process sent into this process's.
    """
    _report_crashes()
    try:
        pipe.send(Message("hello"))
        setup: Setup = pipe.recv()
    except (EOFError, OSError):
        # It was interrupted while this process started.
        os._exit(failures.PARENT_GONE)
    # Before the work is loaded: loading imports modules that read all of these.
    env.replace_environ(adapt(setup.environ))
    sys.argv[:], sys.path[:] = setup.argv, setup.path
    os.chdir(setup.directory)
    multiprocessing.current_process().authkey = setup.authkey
    finish(pipe, setup.work)


def serve_forked(pipe: Connection, environ: Mapping[str, str], work: Callable[[], Any]) -> NoReturn:
    """Run the child in a fork of the launching process; never returns into the launching program."""
    try:
        # The launching process's exit hooks are not for this process to run.
        atexit._clear()  # noqa: SLF001
        leave_interrupts_to_launcher()
        env.replace_environ(environ)
        _report_crashes()
        finish(pipe, work)
        end_process(0, takes_apart=False)
    finally:
        os._exit(1)


def _report_crashes() -> None:
    """Print the Python stacks after a crash in C++, which are the only trace of what the process did."""
    # A process may have no standard error.
    if sys.stderr is not None:
        faulthandler.enable()


def finish(pipe: Connection, work: bytes | Callable[[], Any]) -> None:
    """Run the work and answer, while a thread answers the launching process's requests."""
    # Connect before the work is loaded: loading may take long, and a Ctrl-C must reach this process.
    link = failures.connect(pipe, interrupt, functools.partial(_take_signal, _record_signals()))
    answer = _run(work)
    if _is_interrupted.is_set():
        # Replicas in other threads run their `finally` blocks, too. The answer must still arrive in time.
        deadline = time.monotonic() + failures.INTERRUPT_GRACE_S / 2
        for thread in _replica_threads():
            thread.join(max(0.0, deadline - time.monotonic()))
    # Before the answer: a replica whose output is lost has not succeeded.
    try:
        _flush()
    except Exception as error:
        if isinstance(answer, Returned):
            lost = ReplicaLostError(f"the replica's process could not write its output: {error}")
            answer = _raised(lost)
    _has_answered.set()
    link.send(Message("answer", pack(answer)))
    if isinstance(answer, Raised) and _replica_threads():
        # Other replicas of this process wait in a collective for the one that failed; only the end of the
        # process stops them.
        os._exit(1)


def _replica_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(REPLICA_THREAD)]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A process may have no such stream, and a program may close its own.
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()


def _run(work: bytes | Callable[[], Any]) -> Returned | Raised:
    try:
        if callable(work):
            return Returned(work())
        run, job, place = cloudpickle.loads(work)
        remove_remote_modules()
        return Returned(run(job, place))
    except BaseException as raised:
        # It may come from loading the work as well, which imports the program's modules.
        return _raised(raised)


def _raised(raised: BaseException) -> Raised:
    error = tracebacks.as_error(raised, "the replica's process")
    tracebacks.fold(error)
    return failures.explain(Raised(error, "".join(traceback.format_exception(error))))


def end_process(code: int, *, takes_apart: bool = True) -> NoReturn:
    """End a fork of a prepared process in the order of Python's own end, in a fraction of the time.

    Threads end, exit hooks run, and all open files are written. Python would take all imported modules apart:
    for torch and JAX that is a second of computing, and a fork copies most of their memory for it. Here, only
    what has come since the fork is taken apart.

    Args:
        code: the exit code.
        takes_apart: whether the objects of ``__main__`` are this process's to delete, and not its parent's.
    """
    steps = [threading._shutdown, atexit._run_exitfuncs]  # type: ignore[attr-defined]  # noqa: SLF001
    for step in [*steps, *([_take_apart] if takes_apart else [])]:
        try:
            step()
        except BaseException:
            traceback.print_exc()
    try:
        _flush()
        # C libraries print through buffers of their own.
        ctypes.CDLL(None).fflush(None)
    except Exception:
        code = FLUSH_FAILED
    finally:
        os._exit(code)


def _take_apart() -> None:
    """Delete the objects of the program, and write what it has left in open files of other modules."""
    # A thread that still runs misses what is deleted; at Python's own end it would not run any more.
    threading.excepthook = lambda _: None
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    # Objects that were frozen before the fork are not listed. `isinstance` would run code of those that say
    # something else of their class, such as torch's deprecated ones.
    for found in gc.get_objects():
        if issubclass(type(found), _FILES) and not found.closed:
            found.flush()


def remove_remote_modules() -> None:
    """Remove the directory that torch makes when it is imported, and which a killed process would leave.

    Source: torch 2.9, ``torch/distributed/nn/jit/instantiator.py``. The module in it has been imported. torch
    2.15 makes none.
    """
    instantiator = sys.modules.get("torch.distributed.nn.jit.instantiator")
    if directory := getattr(instantiator, "_TEMP_DIR", None):
        directory.cleanup()
