"""Pickling for other processes: functions and classes of a script or notebook by value."""

from __future__ import annotations

import functools
import importlib
import io
from collections import ChainMap
from collections.abc import Callable, Mapping
from types import CodeType, ModuleType
from typing import Any, ClassVar

import cloudpickle

_SENT = ("cpu", "meta")
"""Devices whose tensors are sent as they are."""


def dumps(value: Any) -> bytes:
    """Return a value as bytes, which `cloudpickle.loads` reads where polyxla is installed.

    Raises:
        Exception: a part of the value cannot be pickled.
    """
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
