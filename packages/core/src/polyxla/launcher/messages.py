"""The messages on the pipe between the launching process and a replica process."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from polyxla.contracts.job import ReplicaResult
from polyxla.errors import UsageError
from polyxla.launcher.pickling import dumps, pickles


@dataclass(frozen=True)
class Setup:
    """The first message to a new process.

    Attributes:
        environ: its whole environment.
        argv: its `sys.argv`: a function that parses arguments must not get its defaults in silence.
        path: its `sys.path`.
        directory: its working directory.
        authkey: by which it proves to a manager of multiprocessing that it belongs to this program.
        work: the pickled work and place.
    """

    environ: dict[str, str]
    argv: list[str]
    path: list[str]
    directory: str
    authkey: bytes = field(repr=False)
    work: bytes


@dataclass(frozen=True)
class Message:
    """A message from a replica process.

    Attributes:
        kind: ``hello``, ``replica``, ``answer``, ``stalled`` or ``position``.
        content: of a replica, its `Position`; of an answer, the packed `Returned` or `Raised`; of a stall,
            its `StallReport`; otherwise text.
    """

    kind: str
    content: Any = None


@dataclass(frozen=True)
class StallReport:
    """What a process's replicas wait for.

    Attributes:
        text: says so, and where they are.
        returned: ordinals of the replicas that have returned, if the others wait for them.
    """

    text: str
    returned: tuple[int, ...]


@dataclass(frozen=True)
class Returned:
    """The work's result."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """The exception that ended the work, and its traceback as text."""

    error: BaseException
    traceback: str


class ReplicaFailedError(Exception):
    """A replica raised an exception that cannot be pickled; this one holds its text."""


class _Rebuilt:
    """An exception that is loaded without its ``__init__``, whose arguments are not those it was called with.

    Args:
        error: the exception.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        kind = type(self._error)
        return _without_init, (kind, self._error.args), vars(self._error)


def _without_init(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    return kind.__new__(kind, *args)


class RemoteTraceback(Exception):
    """The traceback text of an exception that was raised in another process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def pack(answer: Returned | Raised) -> bytes:
    """Pickle an answer; an answer that cannot be pickled becomes an error."""
    try:
        return dumps(answer) if isinstance(answer, Returned) else _pack_raised(answer)
    except Exception as error:
        return dumps(_in_words(answer, error))


def _pack_raised(answer: Raised) -> bytes:
    packed = dumps(answer)
    try:
        # An exception class with its own __init__ often pickles but does not load again.
        cloudpickle.loads(packed)
    except Exception:
        packed = dumps(Raised(_Rebuilt(answer.error), answer.traceback))  # type: ignore[arg-type]
        cloudpickle.loads(packed)
    return packed


def unpack(packed: bytes) -> Any:
    """Return the result in an answer.

    Raises:
        UsageError: the result cannot be loaded in this process.
        Exception: what the replica raised, with its traceback as the cause.
    """
    try:
        answer: Returned | Raised = cloudpickle.loads(packed)
    except Exception as error:
        raise UsageError(
            f"the function's result cannot be read here: {type(error).__name__}: {error}",
            where="launch",
            fix="Return numbers, strings, CPU tensors, or collections of them.",
        ) from error
    if isinstance(answer, Raised):
        raise answer.error from RemoteTraceback(answer.traceback)
    return answer.value


def _in_words(answer: Returned | Raised, error: Exception) -> Raised:
    if isinstance(answer, Raised):
        text = "".join(traceback.format_exception_only(answer.error)).strip()
        return Raised(ReplicaFailedError(text), answer.traceback)
    # One result, or several of replicas in threads.
    results = answer.value if isinstance(answer.value, list) else [answer.value]
    values = [one.value for one in results if isinstance(one, ReplicaResult)]
    culprit = next((one for one in values if not pickles(one)), answer.value)
    refusal = UsageError(
        f"the function's result ({type(culprit).__name__}) cannot be sent back: {error}",
        where="launch",
        fix="Return numbers, strings, CPU tensors, or collections of them.",
    )
    return Raised(refusal, "")
