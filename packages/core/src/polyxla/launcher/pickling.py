"""Pickling for other processes: functions and classes of a script or notebook by value."""

from __future__ import annotations

import io
from collections import ChainMap
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, ClassVar

import cloudpickle


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
