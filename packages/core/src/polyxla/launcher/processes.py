"""Replicas as processes: started with an environment of their own, monitored, and always ended.

The launching process has one pipe to each child (`polyxla.launcher.child`): the child sends hello, receives
the job, and answers once. Until then it reports which replicas have started and returned, and may say that
they stall; the launching process then asks all others for their position and ends them
(`polyxla.launcher.failures`). The end of a child without an answer is noticed at once, because its end of the
pipe closes; or within `LIVENESS_CHECK_S`, where a process that the child forked, such as a data loader's
worker, still holds that end.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from polyxla import env
from polyxla.console import say
from polyxla.contracts.job import Job, ProcessMethod, StartMethod
from polyxla.errors import ReplicaLostError, UsageError
from polyxla.launcher import failures
from polyxla.launcher.child import remove_remote_modules, serve_forked
from polyxla.launcher.failures import STOP_GRACE_S, ReplicaProcess
from polyxla.launcher.messages import Message, Setup, dumps, pickles, unpack
from polyxla.launcher.process_handle import POLL_S, OwnProcess, is_stopped, signal_name
from polyxla.launcher.start_methods import interrupts_blocked, running_fork_server, spawn

EXIT_GRACE_S = 0.5
"""Time for a process that has answered to exit before the job's other processes are ended, in seconds."""
LIVENESS_CHECK_S = 1.0
"""How often to check whether the children are alive, in seconds."""
EXIT_NOTICE_S = 60.0
"""How often to say which processes have answered and still run, in seconds."""


class Terminated(BaseException):
    """Raised by a handler in the launching process: it received a signal that its replicas are to take.

    Args:
        number: the signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return signal_name(self.number)


def run_inline(job: Job, place: Any = None) -> list[Any]:
    """Run a job of one replica in this process, with the job's environment for that time."""
    with env.temporary_environ(job.environ):
        return [job.run(place)]


def refuse_inline(start_method: StartMethod, replicas: int) -> None:
    """Check that several replicas are not requested to run in this process.

    Raises:
        UsageError: they are.
    """
    if start_method == "inline" and replicas > 1:
        raise UsageError(
            f"{replicas} replicas cannot run inline: one that fails could not be stopped",
            where="start_method='inline'",
            fix="Leave start_method out.",
        )


def run_processes(
    job: Job,
    places: Sequence[Any],
    environs: Sequence[Mapping[str, str]],
    *,
    run: Callable[[Job, Any], Any] = Job.run,
    method: ProcessMethod = "spawn",
    preload: Sequence[str] = (),
    slices: Sequence[int] = (),
) -> list[Any]:
    """Call ``run(job, place)`` in a process for each place; return the results in that order.

    Returns when all processes have ended. When one fails, the others are ended within `STOP_GRACE_S` and its
    exception is raised here.

    Args:
        job: what to run. Unless the processes are forked from this one it must pickle (functions of scripts
            and notebooks do, lambdas too).
        places: one for each process.
        environs: the whole environment of each process.
        run: called in each process. A runtime passes a function of its own if a process needs preparation, or
            runs several replicas.
        method: ``spawn`` starts a fresh Python each; ``forkserver`` starts one, which imports `preload`,
            forks them, and stays for later launches; ``fork`` forks this process with its memory.
        preload: names of the modules that every process needs; importing them must start nothing.
        slices: the TPU slice of each process, for messages; empty if all have the same.

    Raises:
        UsageError: the job cannot be sent to another process.
        ReplicaLostError: a process ended without an answer, or never sent hello.
        StalledError: replicas waited for each other too long.
        Terminated: a handler raised it; the replicas have had `TERMINATION_GRACE_S` to end by themselves.
        Exception: what a replica raised, with the text of its traceback as the cause.
    """
    timeout_s = env.timeout_s(job.environ, env.POLYXLA_START_TIMEOUT_S)
    children: list[ReplicaProcess] = []
    # It is this process's own, and a signal may end this one, too.
    remove_remote_modules()
    try:
        if method == "fork":
            _fork(run, job, places, environs, children)
            _name_slices(children, slices)
        else:
            setups = _setups(run, job, places, environs)
            pairs = [multiprocessing.connection.Pipe() for _ in places]
            server = running_fork_server(environs[0], preload) if method == "forkserver" else None
            for index, (ours, theirs) in enumerate(pairs):
                with interrupts_blocked():
                    process = server.fork(theirs) if server else spawn(theirs, environs[index])
                    children.append(ReplicaProcess(index, process, ours))
                # Only the child may hold this end, or its death would not close the pipe.
                theirs.close()
            _name_slices(children, slices)
            for child, setup in zip(children, setups, strict=True):
                _greet(child, setup, timeout_s)
        try:
            results = _gather(children)
            _await_exits(children)
        except KeyboardInterrupt:
            _interrupt(children)
            raise
        except Terminated as request:
            _terminate(children, request.number)
            raise
        return results
    finally:
        _stop(children)


def _name_slices(children: Sequence[ReplicaProcess], slices: Sequence[int]) -> None:
    # Of one launch's processes, all or none are on one of several slices.
    for child, slice_id in zip(children, slices, strict=False):
        child.slice_id = slice_id


def _fork(
    run: Callable[[Job, Any], Any],
    job: Job,
    places: Sequence[Any],
    environs: Sequence[Mapping[str, str]],
    children: list[ReplicaProcess],
) -> None:
    # Each fork would otherwise write the buffered output once more.
    sys.stdout.flush()
    sys.stderr.flush()
    for index, (place, environ) in enumerate(zip(places, environs, strict=True)):
        ours, theirs = multiprocessing.connection.Pipe()
        with interrupts_blocked():
            pid = os.fork()
            if pid == 0:
                for pipe in [ours, *(child.pipe for child in children)]:
                    pipe.close()
                serve_forked(theirs, environ, functools.partial(run, job, place))
            children.append(ReplicaProcess(index, OwnProcess(pid), ours))
        theirs.close()


def _setups(
    run: Callable[[Job, Any], Any], job: Job, places: Sequence[Any], environs: Sequence[Mapping[str, str]]
) -> list[Setup]:
    directory = str(env.working_directory())
    authkey = bytes(multiprocessing.current_process().authkey)
    return [
        Setup(dict(environ), sys.argv, sys.path, directory, authkey, _pickled(run, job, place))
        for place, environ in zip(places, environs, strict=True)
    ]


def _pickled(run: Callable[[Job, Any], Any], job: Job, place: Any) -> bytes:
    try:
        return dumps((run, job, place))
    except Exception as error:
        culprit = next((name for name, part in _named_parts(job) if not pickles(part)), "the job")
        raise UsageError(
            f"{culprit} cannot be sent to another process: {error}",
            where="launch",
            fix="Create what cannot be pickled (locks, open files, generators, iterators of loaders) inside "
            "the function, or run one replica with start_method='inline'.",
        ) from error


def _named_parts(job: Job) -> list[tuple[str, Any]]:
    name = getattr(job.function, "__qualname__", repr(job.function))
    return [(f"train_fn ({name})", job.function), *((f"args[{i}]", arg) for i, arg in enumerate(job.args))]


def _greet(child: ReplicaProcess, setup: Setup, timeout_s: float) -> None:
    try:
        if not child.pipe.poll(timeout_s):
            if is_stopped(child.process.pid):
                raise ReplicaLostError(f"{child} {failures.stopped(child)}")
            raise ReplicaLostError(
                f"{child} did not answer within {timeout_s:g} s of its start; {env.POLYXLA_START_TIMEOUT_S} "
                "sets the limit"
            )
        # Only after hello is somebody there to read: a large setup would otherwise fill the pipe, and block
        # this thread for good.
        child.pipe.recv()
        child.pipe.send(setup)
    except (EOFError, OSError):
        raise failures.lost(child, [child]) from None


def _gather(children: Sequence[ReplicaProcess]) -> list[Any]:
    results: list[Any] = [None] * len(children)
    waiting: dict[Connection, ReplicaProcess] = {child.pipe: child for child in children}
    while waiting:
        ready: Any = multiprocessing.connection.wait(list(waiting), LIVENESS_CHECK_S)
        for pipe in ready:
            child = waiting[pipe]
            message = _receive(child, children)
            if message is None:
                continue
            if message.kind == "stalled":
                raise failures.stalled(children, child, message.content)
            # This comes before the answer is read: a death that explains an error is looked for among the
            # other processes.
            waiting.pop(pipe)
            child.has_answered = True
            try:
                results[child.index] = unpack(message.content)
            except BaseException as error:
                # Errors follow from a death within milliseconds, and may overtake its notice.
                if death := failures.find_death(children):
                    raise death from error
                raise
        if not ready:
            _check_alive(children)
    return results


def _await_exits(children: Sequence[ReplicaProcess]) -> None:
    """Wait until the processes, which have all answered, have ended.

    Their threads and exit functions may still write a checkpoint. As for an answer, there is no limit to the
    wait, because a thread may be the program's main work; what it waits for is said every `EXIT_NOTICE_S`.

    Raises:
        ReplicaLostError: one has ended by a signal, or with another exit code than 0.
    """
    notice = time.monotonic() + EXIT_NOTICE_S
    while running := [child for child in children if _is_running(child)]:
        if time.monotonic() >= notice:
            notice += EXIT_NOTICE_S
            say(
                f"waiting for the end of {', '.join(map(str, running))}: the function has returned, and "
                "threads or exit functions of the program still run; Ctrl-C ends them"
            )
        time.sleep(POLL_S)


def _is_running(child: ReplicaProcess) -> bool:
    end = child.process.ended()
    if end and end.code:
        raise ReplicaLostError(f"{child} returned, then {end}")
    return end is None


def _interrupt(children: Sequence[ReplicaProcess]) -> None:
    """Interrupt the replicas, and wait until they have answered or ended."""
    waiting = {child.pipe: child for child in children if not child.has_answered}
    for pipe in waiting:
        with contextlib.suppress(OSError):
            pipe.send(failures.INTERRUPT)
    deadline = time.monotonic() + failures.INTERRUPT_GRACE_S
    while waiting and (left := deadline - time.monotonic()) > 0:
        ready: Any = multiprocessing.connection.wait(list(waiting), left)
        for pipe in ready:
            try:
                message = waiting[pipe].receive()
            except (EOFError, OSError):
                waiting.pop(pipe)
                continue
            if message is not None and message.kind == "answer":
                waiting.pop(pipe).has_answered = True
            elif message is not None and message.kind == "saves":
                deadline = time.monotonic() + failures.TERMINATION_GRACE_S


def _terminate(children: Sequence[ReplicaProcess], number: int) -> None:
    """Pass a signal on to the replicas, and wait until their processes have ended."""
    # Some senders signal every process of the group; a replica must not take the signal twice.
    time.sleep(failures.SIGNAL_SPREAD_S)
    # A second one ends this process at once, and thereby its replicas.
    signal.signal(number, signal.SIG_DFL)
    for child in children:
        with contextlib.suppress(OSError):
            child.pipe.send(number)
    deadline = time.monotonic() + failures.TERMINATION_GRACE_S
    for child in children:
        child.process.wait(deadline)


def _receive(child: ReplicaProcess, children: Sequence[ReplicaProcess]) -> Message | None:
    try:
        return child.receive()
    except (EOFError, OSError):
        raise failures.lost(child, children) from None


def _check_alive(children: Sequence[ReplicaProcess]) -> None:
    for child in children:
        # In this order: once it has ended, everything that it sent is in the pipe.
        if not child.has_answered and child.process.ended() and not child.pipe.poll():
            raise failures.lost(child, children)


def _stop(children: Sequence[ReplicaProcess]) -> None:
    if not all(child.has_answered for child in children):
        # One that has answered runs its exit functions, unless it waits there for the others.
        grace = time.monotonic() + EXIT_GRACE_S
        for child in children:
            if child.has_answered:
                child.process.wait(grace)
        # The first process may serve the others, which would report its end on standard error.
        for child in reversed(children):
            child.process.signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_GRACE_S
    for child in children:
        if child.process.wait(deadline) is None:
            child.process.signal(signal.SIGKILL)
            child.process.wait(time.monotonic() + STOP_GRACE_S)
        child.pipe.close()
