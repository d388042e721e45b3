"""Which line of the user's program is behind the current call."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from pathlib import Path
from types import CodeType, FrameType

LIBRARIES = sys.stdlib_module_names | {
    *("pluggy", "numpy"),
    *("torch", "torch_xla", "functorch", "lightning", "lightning_fabric", "pytorch_lightning"),
}
"""Packages between the user's line and the device."""
PLUGIN_GROUPS = ("polyxla", "polyxla.runtimes", "polyxla.hookspecs", "torch_xla.plugins")
"""Entry-point groups whose packages, ours and third parties', act for polyxla and are not the user's program."""
BACKWARD = "the backward pass"
"""What is said where torch's own thread runs, in which no line of the program is to be seen."""


@functools.cache
def own_packages() -> frozenset[str]:
    """Return polyxla and the packages of every installed plugin, by the names they are imported by."""
    points = (point for group in PLUGIN_GROUPS for point in importlib.metadata.entry_points(group=group))
    return frozenset({"polyxla", *(point.module.partition(".")[0] for point in points)})


def caller(observer: str = "") -> str | None:
    """Return ``file:line`` of the innermost frame of the user's program; None if polyxla itself acts.

    torch's optimizers act for polyxla when a step ends, but what they read is theirs: their line is returned.

    Args:
        observer: name of the module that watches the call, whose frames do not count as polyxla's.
    """
    frame: FrameType | None = sys._getframe(1)
    behind: str | None = None
    while frame is not None and not _is_users(frame):
        module = _module(frame)
        if module != observer and _package(frame) in own_packages():
            return behind
        if module.startswith("torch.autograd"):
            behind = BACKWARD
        elif module.startswith("torch.optim.") and module != "torch.optim.optimizer":
            behind = place(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return place(frame.f_code, frame.f_lineno) if frame else BACKWARD


def outside() -> str | None:
    """Return ``file:line`` of the innermost frame of the user's program, such as that of ``replica.step``."""
    return _outside(sys._getframe(1))


def in_thread(ident: int) -> str | None:
    """Return ``file:line`` of a thread's innermost frame of the user's program; None without one."""
    return _outside(sys._current_frames().get(ident))


def _outside(frame: FrameType | None) -> str | None:
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return place(frame.f_code, frame.f_lineno) if frame else None


def place(code: CodeType, line: int | None = None) -> str:
    """Return ``file:line``, the file as seen from the working directory where it is below."""
    path = Path(code.co_filename)
    here = Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return f"{os.fspath(shown)}:{line or code.co_firstlineno}"


def _is_users(frame: FrameType) -> bool:
    package = _package(frame)
    return package not in LIBRARIES and package not in own_packages()


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def _package(frame: FrameType) -> str:
    return _module(frame).partition(".")[0]
