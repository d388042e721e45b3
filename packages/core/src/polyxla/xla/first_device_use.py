"""Recording where a process first used a device, so that an error can name the line.

Heavy: it imports torch_xla.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch_xla

from polyxla.errors import UsageError

_DEVICE_FUNCTIONS = (
    "_xla_get_default_device",
    "_xla_get_devices",
    "_xla_real_devices",
    "_xla_set_default_device",
)
"""The functions of torch_xla's C++ module through which a Python program first reaches a device."""
_UNKNOWN = "an unknown line"

_native: Any = torch_xla._XLAC  # type: ignore[attr-defined]
_lines: list[str] = []
_then: list[Callable[[], None]] = []


def record(then: Callable[[], None] = lambda: None) -> None:
    """Record the line that first uses a device, then call `then`.

    Wraps functions of torch_xla until then. Several runtimes may call this; each `then` is called.
    """
    _then.append(then)
    if len(_then) > 1:
        return
    originals = {name: getattr(_native, name) for name in _DEVICE_FUNCTIONS}

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def recorded(*args: Any) -> Any:
            line = _user_line()
            result = function(*args)
            if _native._xla_runtime_is_initialized():
                _lines.append(line)
                for name, plain in originals.items():
                    setattr(_native, name, plain)
                for follow in _then:
                    follow()
            return result

        return recorded

    for name, function in originals.items():
        setattr(_native, name, recording(function))


def refuse(launcher: str) -> None:
    """Refuse to launch from a process that already uses a device; a TPU's chips would refuse later.

    Raises:
        UsageError: the process uses a device; the error names the line that used it first.
    """
    if _native._xla_runtime_is_initialized():
        raise UsageError(
            f"{launcher} was called in a process that already uses a device; "
            f"the device was first used at {_lines[0] if _lines else _UNKNOWN}",
            where=launcher,
            fix="Use devices only in the function that is launched.",
        )


def _user_line() -> str:
    libraries = [Path(module.__file__ or "").parent for module in (torch, torch_xla)]
    for frame in reversed(traceback.extract_stack()[:-2]):
        if not any(Path(frame.filename).is_relative_to(library) for library in libraries):
            return f"{frame.filename}:{frame.lineno}"
    return _UNKNOWN
