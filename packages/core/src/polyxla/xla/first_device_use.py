"""Where a process first touched a device, so that an error can name the line. Heavy: it imports torch_xla."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch_xla

from polyxla.errors import UsageError

_TOUCHES = ("_xla_get_default_device", "_xla_get_devices", "_xla_real_devices", "_xla_set_default_device")
"""The functions of torch_xla's C++ part through which Python programs come to a device first."""
_UNKNOWN = "a place that is not known"

_native: Any = torch_xla._XLAC  # type: ignore[attr-defined]
_places: list[str] = []
_then: list[Callable[[], None]] = []


def remember(then: Callable[[], None] = lambda: None) -> None:
    """Remember who touches a device first, and call `then`; from then on torch_xla is as it was.

    Any number of runtimes may ask for it.
    """
    _then.append(then)
    if len(_then) > 1:
        return
    own = {name: getattr(_native, name) for name in _TOUCHES}

    def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def touch(*args: Any) -> Any:
            place = _caller()
            result = function(*args)
            if _native._xla_runtime_is_initialized():
                _places.append(place)
                for name, plain in own.items():
                    setattr(_native, name, plain)
                for follow in _then:
                    follow()
            return result

        return touch

    for name, function in own.items():
        setattr(_native, name, remembering(function))


def refuse(launcher: str) -> None:
    """Refuse to launch from a process that already uses a device, as a TPU's chips would.

    Raises:
        UsageError: with the place that touched it first.
    """
    if _native._xla_runtime_is_initialized():
        raise UsageError(
            f"{launcher} was called in a process that already uses a device; "
            f"it was first touched at {_places[0] if _places else _UNKNOWN}",
            where=launcher,
            fix="Touch devices only in the function that is launched.",
        )


def _caller() -> str:
    libraries = [Path(module.__file__ or "").parent for module in (torch, torch_xla)]
    for frame in reversed(traceback.extract_stack()[:-2]):
        if not any(Path(frame.filename).is_relative_to(library) for library in libraries):
            return f"{frame.filename}:{frame.lineno}"
    return _UNKNOWN
