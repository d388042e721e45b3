"""Replicas as processes: started with an environment of their own, watched, and never left behind.

The parent talks with each child (`polyxla.launcher.child`) over one pipe: the child says hello, the parent
sends the work, the child answers once. In between the child may report that its replicas wait in vain;
the parent then asks all the others where they are, before it ends them. A child that goes away without
an answer is seen at once, because its end of the pipe closes with it; or within `LOST_CHECK_S`, where a
process that the child forked (a data loader's worker) still holds that end.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import cloudpickle

from polyxla import env
from polyxla.console import say
from polyxla.contracts.job import Job, ProcessMethod
from polyxla.errors import PolyxlaError, ReplicaLostError, StalledError, UsageError
from polyxla.launcher.child import Message, Raised, Returned, Setup, be_forked
from polyxla.launcher.start_methods import OwnProcess, Process, running_fork_server, spawn

STOP_GRACE_S = 5.0
"""How long a child may take to end after it was asked to, in seconds, before it is killed."""
LOST_CHECK_S = 1.0
"""How often to look whether children that are waited for still live, in seconds."""
POSITION_WAIT_S = 5.0
"""Longest wait, when replicas stall, for all processes to say where they are, in seconds."""


class Work(Protocol):
    """What a process is started for: a `polyxla.Job`, or a runtime's own object around one."""

    @property
    def function(self) -> Callable[..., Any]:
        """What the person asked to run, to be named in errors."""

    @property
    def args(self) -> tuple[Any, ...]:
        """The function's arguments, to be named in errors."""

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment that holds the limits of waiting."""

    def run(self, place: Any) -> Any:
        """Do it, in the new process, and return what the parent is to have."""


class RemoteTraceback(Exception):
    """The traceback text of an exception that was raised in another process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass
class _Child:
    index: int
    process: Process
    pipe: Connection
    answered: bool = False

    def __str__(self) -> str:
        return f"process {self.index} (pid {self.process.pid})"


def run_inline(job: Job, place: Any = None) -> list[Any]:
    """Run a job of one replica in this process, which has the job's environment meanwhile."""
    with env.lent(job.environ):
        return [job.run(place)]


def run_processes(
    job: Work,
    places: Sequence[Any],
    environs: Sequence[Mapping[str, str]],
    *,
    method: ProcessMethod = "spawn",
    preload: Sequence[str] = (),
) -> list[Any]:
    """Run ``job.run(place)`` in a process for each place; return the results in that order.

    When one fails, the others are ended within `STOP_GRACE_S` and its exception is raised here.

    Args:
        job: the work. Unless they are forked from this process it must pickle (functions of scripts and
            notebooks do, lambdas too).
        places: what each process hands to the runtime's `polyxla_replication`.
        environs: the whole environment of each process.
        method: ``spawn`` starts a fresh Python each; ``forkserver`` starts one, which imports `preload`,
            forks them, and stays for later launches; ``fork`` forks this process, with all that it has made.
        preload: names of the modules that every process needs; importing them must start nothing.

    Raises:
        UsageError: the job cannot be sent to another process.
        ReplicaLostError: a process ended without an answer, or never said hello.
        StalledError: replicas waited for each other too long.
        Exception: what a replica raised, with the text of its traceback as the cause.
    """
    timeout_s = env.timeout_s(job.environ, env.POLYXLA_START_TIMEOUT_S)
    children: list[_Child] = []
    try:
        if method == "fork":
            children = _fork(job, places, environs)
        else:
            setups = _setups(job, places, environs)
            pairs = [multiprocessing.connection.Pipe() for _ in places]
            server = running_fork_server(environs[0], preload) if method == "forkserver" else None
            for index, (ours, theirs) in enumerate(pairs):
                process = server.fork(theirs) if server else spawn(theirs, environs[index])
                children.append(_Child(index, process, ours))
                # Only the child may hold this end, or its death would not close the pipe.
                theirs.close()
            for child, setup in zip(children, setups, strict=True):
                _greet(child, setup, timeout_s)
        return _gather(children)
    finally:
        _stop(children)


def _fork(job: Work, places: Sequence[Any], environs: Sequence[Mapping[str, str]]) -> list[_Child]:
    children: list[_Child] = []
    # Or what waits in them would be written once more by each process.
    sys.stdout.flush()
    sys.stderr.flush()
    for index, (place, environ) in enumerate(zip(places, environs, strict=True)):
        ours, theirs = multiprocessing.connection.Pipe()
        pid = os.fork()
        if pid == 0:
            for pipe in [ours, *(child.pipe for child in children)]:
                pipe.close()
            be_forked(theirs, environ, functools.partial(job.run, place))
        theirs.close()
        children.append(_Child(index, OwnProcess(pid), ours))
    return children


def _packed(job: Work, place: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps((job, place)))
    except Exception as error:
        culprit = next((name for name, part in _parts(job) if not _pickles(part)), "the job")
        raise UsageError(
            f"{culprit} cannot be sent to another process: {error}",
            where="launch",
            fix="Make what cannot be sent (locks, open files, generators, loaders' iterators) inside "
            "the function, or run one replica with start_method='inline'.",
        ) from error


def _parts(job: Work) -> list[tuple[str, Any]]:
    name = getattr(job.function, "__qualname__", repr(job.function))
    return [(f"train_fn ({name})", job.function), *((f"args[{i}]", arg) for i, arg in enumerate(job.args))]


def _pickles(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _setups(job: Work, places: Sequence[Any], environs: Sequence[Mapping[str, str]]) -> list[Setup]:
    folder = str(Path.cwd())
    return [
        Setup(dict(environ), sys.path, folder, _packed(job, place))
        for place, environ in zip(places, environs, strict=True)
    ]


def _greet(child: _Child, setup: Setup, timeout_s: float) -> None:
    try:
        if not child.pipe.poll(timeout_s):
            raise ReplicaLostError(
                f"{child} did not answer within {timeout_s:g} s of its start; "
                f"{env.POLYXLA_START_TIMEOUT_S} sets the limit"
            )
        child.pipe.recv()
        child.pipe.send(setup)
    except (EOFError, OSError):
        raise _lost([child]) from None


def _gather(children: Sequence[_Child]) -> list[Any]:
    results: list[Any] = [None] * len(children)
    waiting: dict[object, _Child] = {child.pipe: child for child in children}
    while waiting:
        ready = multiprocessing.connection.wait([child.pipe for child in waiting.values()], LOST_CHECK_S)
        for pipe in ready:
            child = waiting[pipe]
            message = _message(child, children)
            if message.kind == "stalled":
                raise _stalled(children, child, message.content)
            waiting.pop(pipe)
            child.answered = True
            results[child.index] = _value(message.content)
        if not ready:
            _check_alive(waiting.values())
    return results


def _check_alive(children: Iterable[_Child]) -> None:
    for child in children:
        # In this order: what it sent before it ended is in the pipe by now.
        if child.process.ended() and not child.pipe.poll():
            raise _lost([child])


def _message(child: _Child, children: Sequence[_Child]) -> Message:
    try:
        message: Message = child.pipe.recv()
    except (EOFError, OSError):
        # One that was killed takes those with it that talked to it: name the first.
        raise _lost([child, *(other for other in children if other is not child)]) from None
    return message


def _value(packed: bytes) -> Any:
    answer = _unpacked(packed)
    if isinstance(answer, Raised):
        raise answer.error from RemoteTraceback(answer.traceback)
    return answer.value


def _unpacked(packed: bytes) -> Returned | Raised:
    try:
        answer: Returned | Raised = cloudpickle.loads(packed)
    except Exception as error:
        raise UsageError(
            f"the function's result cannot be read here: {type(error).__name__}: {error}",
            where="launch",
            fix="Return numbers, strings, CPU tensors, or collections of them.",
        ) from error
    return answer


def _lost(children: Sequence[_Child]) -> PolyxlaError:
    first = children[0]
    end = first.process.wait(time.monotonic() + STOP_GRACE_S)
    if end is None:
        return ReplicaLostError(f"{first} closed its pipe and hangs")
    killed = [
        child for child in children if (found := child.process.ended()) and found.code == -signal.SIGKILL
    ]
    if killed and end.code != -signal.SIGKILL:
        first = killed[0]
    return ReplicaLostError(f"{first} {first.process.ended()} before it gave a result")


def _stalled(children: Sequence[_Child], first: _Child, text: str) -> StalledError:
    """Ask everyone where it is, say so, and return the error that ends them all."""
    others = [child for child in children if child is not first and not child.answered]
    for child in others:
        with contextlib.suppress(OSError):
            child.pipe.send(None)
    deadline = time.monotonic() + POSITION_WAIT_S
    say(f"{first} waits in vain:\n{text}")
    for child in others:
        say(f"{child}:\n{_position(child, deadline)}")
    return StalledError(
        f"{first} waited in vain for other replicas: {text.partition(chr(10))[0]}; "
        "where each of them is stands above"
    )


def _position(child: _Child, deadline: float) -> str:
    try:
        while child.pipe.poll(max(0.0, deadline - time.monotonic())):
            message: Message = child.pipe.recv()
            if message.kind in ("position", "stalled"):
                return str(message.content)
    except (EOFError, OSError):
        return str(child.process.wait(deadline) or "its pipe is closed")
    return f"did not say where it is within {POSITION_WAIT_S:g} s: its Python does not run"


def _stop(children: Sequence[_Child]) -> None:
    deadline = time.monotonic() + STOP_GRACE_S
    for child in children:
        # One that has answered is on its way out; interrupting its exit would only make noise.
        if not child.answered:
            child.process.signal(signal.SIGTERM)
    for child in children:
        if child.process.wait(deadline) is None:
            child.process.signal(signal.SIGKILL)
            child.process.wait(time.monotonic() + STOP_GRACE_S)
        child.pipe.close()
