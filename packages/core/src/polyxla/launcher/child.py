"""The child's side of `polyxla.launcher.processes`: receive one job, run it, answer once."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import cloudpickle

from polyxla import env
from polyxla.console import say
from polyxla.errors import PolyxlaError, UsageError

REPLICA_THREAD = "polyxla-replica"
"""How the name of a thread begins that is a replica."""
PARENT_GONE = 3
"""Exit code of a child whose parent went away."""
STALLED = 5
"""Exit code of a process whose replicas wait in vain, where no parent is there to end it."""


@dataclass(frozen=True)
class Setup:
    """What a new process gets first.

    Attributes:
        environ: its whole environment.
        path: where it looks for modules.
        folder: its current folder.
        work: the pickled job and place.
    """

    environ: dict[str, str]
    path: list[str]
    folder: str
    work: bytes


@dataclass(frozen=True)
class Message:
    """What a child tells its parent.

    Attributes:
        kind: ``hello``, ``answer``, ``stalled`` or ``position``.
        content: of an answer, the pickled `Returned` or `Raised`; else text.
    """

    kind: str
    content: Any = None


@dataclass(frozen=True)
class Returned:
    """The job's result."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """The exception that ended the job, and its traceback as text."""

    error: BaseException
    traceback: str


class ReplicaFailedError(PolyxlaError):
    """A replica raised an exception that cannot travel between processes; its text is here."""


def main() -> None:
    """Serve the pipe whose descriptor is the second argument, then end."""
    (number,) = json.loads(sys.argv[2])
    serve(Connection(number))


def serve(pipe: Connection, adapt: Callable[[dict[str, str]], dict[str, str]] = dict) -> None:
    """Be the process that the parent at the other end wants: get its environment and work, answer once.

    Args:
        pipe: the child's end.
        adapt: makes the environment of the one that the parent sends.
    """
    sys.argv[:] = [""]
    faulthandler.enable()
    pipe.send(Message("hello"))
    setup: Setup = pipe.recv()
    env.take_over(adapt(setup.environ))
    sys.path[:] = setup.path
    os.chdir(setup.folder)
    finish(pipe, setup.work)


def be_forked(pipe: Connection, environ: Mapping[str, str], work: Callable[[], Any]) -> NoReturn:
    """Be a fork of the parent: do the work, answer, and end without returning into the parent's program."""
    code = 1
    try:
        # What the parent has registered for its own end is not this process's to do.
        atexit._clear()  # noqa: SLF001
        env.take_over(environ)
        faulthandler.enable()
        finish(pipe, work)
        # As at the end of any Python: first its threads, then its exit hooks.
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
        atexit._run_exitfuncs()  # noqa: SLF001
        sys.stdout.flush()
        sys.stderr.flush()
        code = 0
    finally:
        os._exit(code)


def finish(pipe: Connection, work: bytes | Callable[[], Any]) -> None:
    """Do the work and answer, while the parent is listened to."""
    link = _here.link = _Link(pipe)
    threading.Thread(target=link.listen, name="polyxla-parent", daemon=True).start()
    answer = _work(work)
    link.send(Message("answer", _packed(answer)))
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(answer, Raised) and _holds_replicas():
        # They wait in a collective for the one that failed; nothing but the end of the process stops them.
        os._exit(1)


def report_stall(text: str) -> None:
    """Tell the parent that the replicas here wait in vain; it asks all others where they are, and ends them.

    Args:
        text: what they wait for, and where they are.
    """
    if _here.link is None:
        say(text)
        os._exit(STALLED)
    _here.link.send(Message("stalled", text))


def give_up(error: PolyxlaError) -> NoReturn:
    """End this process for a reason that is no matter of its program, such as a device that is gone.

    The parent raises the error, and ends the others. Where there is none, the error is printed.
    """
    if _here.link is None:
        say(f"error: {error}")
    else:
        _here.link.send(Message("answer", _packed(Raised(error, ""))))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code)


def has_parent() -> bool:
    """Return whether this process was started for replicas, and a parent waits for its answer."""
    return _here.link is not None


def describe_with(describe: Callable[[], str]) -> None:
    """Let `describe` say where this process's replicas are, when the parent asks."""
    _here.describe = describe


def stacks() -> str:
    """Return the Python stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for number, frame in sys._current_frames().items()  # noqa: SLF001
        if number != threading.get_ident()
    )


class _Link:
    """The pipe to the parent, which several threads write to."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._pipe.send(message)

    def listen(self) -> None:
        """Answer the parent; and do not outlive it: nobody would stop this process or take its result."""
        try:
            while True:
                self._pipe.recv()
                self.send(Message("position", _here.describe()))
        except (EOFError, OSError):
            os._exit(PARENT_GONE)


@dataclass
class _Here:
    """What this process knows of itself."""

    link: _Link | None = None
    describe: Callable[[], str] = stacks


_here = _Here()


def _holds_replicas() -> bool:
    return any(thread.name.startswith(REPLICA_THREAD) for thread in threading.enumerate())


def _work(work: bytes | Callable[[], Any]) -> Returned | Raised:
    try:
        if callable(work):
            return Returned(work())
        job, place = cloudpickle.loads(work)
        return Returned(job.run(place))
    except BaseException as error:
        return Raised(error, traceback.format_exc())


def _packed(answer: Returned | Raised) -> bytes:
    try:
        packed = bytes(cloudpickle.dumps(answer))
        if isinstance(answer, Raised):
            # An exception class with its own __init__ often pickles but does not load again.
            cloudpickle.loads(packed)
    except Exception as error:
        return bytes(cloudpickle.dumps(_in_words(answer, error)))
    return packed


def _in_words(answer: Returned | Raised, error: Exception) -> Raised:
    if isinstance(answer, Raised):
        text = "".join(traceback.format_exception_only(answer.error)).strip()
        return Raised(ReplicaFailedError(text), answer.traceback)
    refusal = UsageError(
        f"the function's result ({type(answer.value).__name__}) cannot be sent back: {error}",
        where="launch",
        fix="Return numbers, strings, CPU tensors, or collections of them.",
    )
    return Raised(refusal, "")
