"""The messages on the pipe between the launching process and a replica process, and how they are pickled.

Functions and classes of a script or notebook are pickled by value.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import traceback
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any, ClassVar

import cloudpickle

from polyxla.contracts.job import ReplicaResult
from polyxla.errors import UsageError

_SENT = ("cpu", "meta")
"""Devices whose tensors are sent as they are."""


@dataclass(frozen=True)
class Setup:
    """The first message to a new process.

    Attributes:
        environ: its whole environment.
        argv: its `sys.argv`: a function that parses arguments must not get its defaults in silence.
        path: its `sys.path`.
        directory: its working directory.
        authkey: by which it proves to a manager of multiprocessing that it belongs to this program.
        work: pickled: the function to call, and its arguments, the job and the place.
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
        kind: ``hello``, ``replica``, ``answer``, ``stalled``, ``position``, or ``saves`` if a replica that
            is interrupted saves before it ends.
        content: for ``replica`` its `Position`; for ``answer`` the packed `Returned` or `Raised`; for
            ``stalled`` its `StallReport`; otherwise text.
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


@dataclass(frozen=True)
class _SentError:
    """A `Raised` on its way. The launching process may lack what the exception refers to.

    Attributes:
        error: the pickled exception; empty if it cannot be pickled.
        text: what Python prints of it.
        traceback: as text.
    """

    error: bytes
    text: str
    traceback: str


class ReplicaFailedError(Exception):
    """A replica raised an exception that cannot be pickled, or not loaded here; this one holds its text."""


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
    """Pickle an answer; a result that cannot be pickled becomes an error."""
    if isinstance(answer, Returned):
        try:
            return dumps(answer)
        except Exception as error:
            answer = Raised(_refusal(answer.value, error), "")
    text = "".join(traceback.format_exception_only(answer.error)).strip()
    return dumps(_SentError(_pickled(answer.error), text, answer.traceback))


def _pickled(error: BaseException) -> bytes:
    # An exception class with its own __init__ often pickles but does not load again.
    for form in (error, _Rebuilt(error)):
        with contextlib.suppress(Exception):
            packed = dumps(form)
            cloudpickle.loads(packed)
            return packed
    return b""


def unpack(packed: bytes) -> Any:
    """Return the result in an answer.

    Raises:
        UsageError: the result cannot be loaded in this process.
        Exception: what the replica raised, with its traceback as the cause.
    """
    try:
        answer: Returned | _SentError = cloudpickle.loads(packed)
    except Exception as error:
        raise UsageError(
            f"the function's result cannot be read here: {type(error).__name__}: {error}",
            where="launch",
            fix="Return numbers, strings, CPU tensors, or collections of them.",
        ) from error
    if isinstance(answer, _SentError):
        raise _loaded(answer) from RemoteTraceback(answer.traceback)
    return answer.value


def _loaded(sent: _SentError) -> BaseException:
    try:
        error: BaseException = cloudpickle.loads(sent.error)
    except Exception:
        return ReplicaFailedError(sent.text)
    return error


def _refusal(value: Any, error: Exception) -> UsageError:
    # A process with several replicas in threads answers with a list of results.
    results = value if isinstance(value, list) else [value]
    values = [result.value for result in results if isinstance(result, ReplicaResult)]
    culprit = next((value for value in values if not pickles(value)), value)
    return UsageError(
        f"the function's result ({type(culprit).__name__}) cannot be sent back: {error}",
        where="launch",
        fix="Return numbers, strings, CPU tensors, or collections of them.",
    )


def dumps(value: Any) -> bytes:
    """Return a value as bytes, which `cloudpickle.loads` reads where polyxla is installed.

    Raises:
        Exception: a part of the value cannot be pickled.
    """
    # cloudpickle.dumps would use its own pickler, without the reductions below.
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def pickles(value: Any) -> bool:
    """Return whether a value can be sent to another process."""
    try:
        dumps(value)
    except Exception:
        return False
    return True


def _reduce_code(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    """Keep the file's name, without which a traceback has no source lines; cloudpickle 3.1.3 drops it."""
    return _make_code, (cloudpickle.Pickler.dispatch_table[CodeType](code), code.co_filename)


def _make_code(reduced: tuple[Callable[..., CodeType], tuple[Any, ...]], file_name: str) -> CodeType:
    make, arguments = reduced
    return make(*arguments).replace(co_filename=file_name)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Mapping[type, Callable[[Any], Any]]] = ChainMap(
        {CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )

    def reducer_override(self, value: Any) -> Any:
        """Send an object that stands for a module, or an operator of torch, by its name.

        ``torch.ops`` and ``torch.backends.cudnn`` are such objects, and cloudpickle sends a function's
        submodules with it. A device's tensor is copied to the host: the other process has no such device.
        """
        # Exactly torch.Tensor: its subclasses bring their own way of pickling.
        kind = type(value)
        if (kind.__module__, kind.__qualname__) == ("torch", "Tensor") and value.device.type not in _SENT:
            return _as_it_is, (value.detach().cpu().requires_grad_(value.requires_grad),)
        name = _name(value)
        if name is not None and _is_found(name, value):
            return _find, (name,)
        return super().reducer_override(value)


def _as_it_is(value: Any) -> Any:
    return value


def _name(value: Any) -> str | None:
    """Return the name by which an object that cannot be pickled may be found; None for any other object."""
    if isinstance(value, ModuleType) and type(value) is not ModuleType:
        return value.__name__
    if type(value).__module__ == "torch._ops":
        return f"torch.ops.{value}"
    return None


def _is_found(name: str, value: Any) -> bool:
    try:
        # The name must lead to this very object: a program may have put another one in its place.
        return _find(name) is value
    except (AttributeError, ImportError):
        return False


def _find(name: str) -> Any:
    """Return a module by its name; it may be an attribute of another, as ``torch.ops.aten`` is."""
    try:
        return importlib.import_module(name)
    except ImportError:
        first, *others = name.split(".")
        return functools.reduce(getattr, others, importlib.import_module(first))
