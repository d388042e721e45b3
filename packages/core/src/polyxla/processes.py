"""Replicas as processes: started with an environment of their own, watched, and never left behind.

The parent talks with each child (`polyxla.child`) over one pipe: the child says hello, the parent
sends the work, the child answers once. A child that goes away without an answer is seen at once,
because its end of the pipe closes with it; or within `LOST_CHECK_S`, where a process that the child
forked (a data loader's worker) still holds that end.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol

import cloudpickle

from polyxla import env
from polyxla.child import Raised, Returned
from polyxla.errors import PolyxlaError, ReplicaLostError, UsageError

if TYPE_CHECKING:
    from polyxla.launch import Job

STOP_GRACE_S = 5.0
"""How long a child may take to end after it was asked to, in seconds, before it is killed."""
LOST_CHECK_S = 1.0
"""How often to look whether children that are waited for still live, in seconds."""
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); import polyxla.child; polyxla.child.main()"


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
    process: subprocess.Popen[bytes]
    pipe: Connection
    answered: bool = False


def run_inline(job: Job, place: Any = None) -> list[Any]:
    """Run a job of one replica in this process, which has the job's environment meanwhile."""
    with env.lent(job.environ):
        return [job.run(place)]


def run_processes(job: Work, places: Sequence[Any], environs: Sequence[Mapping[str, str]]) -> list[Any]:
    """Run ``job.run(place)`` in a fresh process for each place; return the results in that order.

    When one fails, the others are ended within `STOP_GRACE_S` and its exception is raised here.

    Args:
        job: the work; it must pickle (functions of scripts and notebooks do, lambdas too).
        places: what each process hands to the runtime's `polyxla_replication`.
        environs: the whole environment of each process.

    Raises:
        UsageError: the job cannot be sent to another process.
        ReplicaLostError: a process ended without an answer, or never said hello.
        Exception: what a replica raised, with the text of its traceback as the cause.
    """
    payloads = [_packed(job, place) for place in places]
    timeout_s = start_timeout_s(job.environ)
    children: list[_Child] = []
    try:
        for index, environ in enumerate(environs):
            children.append(_start(index, environ))
        for child, payload in zip(children, payloads, strict=True):
            _greet(child, payload, timeout_s)
        return _gather(children)
    finally:
        _stop([child for child in children if child.process.poll() is None])
        for child in children:
            child.pipe.close()


def start_timeout_s(environ: Mapping[str, str]) -> float:
    """Read how long a new process may take to answer, in seconds.

    Raises:
        UsageError: the variable is not a positive number.
    """
    text = environ.get(env.POLYXLA_START_TIMEOUT_S) or "120"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(
            f"{env.POLYXLA_START_TIMEOUT_S}={text} is not a positive number of seconds",
            where="the environment",
            fix=f"Write {env.POLYXLA_START_TIMEOUT_S}=120.",
        )
    return seconds


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


def _start(index: int, environ: Mapping[str, str]) -> _Child:
    ours, theirs = multiprocessing.connection.Pipe()
    command = [sys.executable, "-c", _START, str(theirs.fileno()), json.dumps(sys.path)]
    process = subprocess.Popen(
        command, env=dict(environ), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
    )
    # Only the child may hold this end, or its death would not close the pipe.
    theirs.close()
    return _Child(index, process, ours)


def _greet(child: _Child, payload: bytes, timeout_s: float) -> None:
    try:
        if not child.pipe.poll(timeout_s):
            raise ReplicaLostError(
                f"process {child.index} (pid {child.process.pid}) did not answer within {timeout_s:g} s "
                f"of its start; {env.POLYXLA_START_TIMEOUT_S} sets the limit"
            )
        child.pipe.recv_bytes()
        child.pipe.send_bytes(payload)
    except (EOFError, OSError):
        raise _lost(child) from None


def _gather(children: Sequence[_Child]) -> list[Any]:
    results: list[Any] = [None] * len(children)
    waiting: dict[object, _Child] = {child.pipe: child for child in children}
    while waiting:
        ready = multiprocessing.connection.wait([child.pipe for child in waiting.values()], LOST_CHECK_S)
        for pipe in ready:
            child = waiting.pop(pipe)
            results[child.index] = _answer(child)
        if not ready:
            _check_alive(waiting.values())
    return results


def _check_alive(children: Iterable[_Child]) -> None:
    for child in children:
        # In this order: what it sent before it ended is in the pipe by now.
        if child.process.poll() is not None and not child.pipe.poll():
            raise _lost(child)


def _answer(child: _Child) -> Any:
    try:
        packed = child.pipe.recv_bytes()
    except (EOFError, OSError):
        raise _lost(child) from None
    child.answered = True
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


def _lost(child: _Child) -> PolyxlaError:
    try:
        code = child.process.wait(STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        return ReplicaLostError(f"process {child.index} (pid {child.process.pid}) closed its pipe and hangs")
    how = f"exited with code {code}"
    if code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        how += " (often the kernel, when memory runs out)"
    return ReplicaLostError(f"process {child.index} (pid {child.process.pid}) {how} before it gave a result")


def _stop(children: Sequence[_Child]) -> None:
    deadline = time.monotonic() + STOP_GRACE_S
    for child in children:
        # One that has answered is on its way out; interrupting its exit would only make noise.
        if not child.answered:
            child.process.terminate()
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
