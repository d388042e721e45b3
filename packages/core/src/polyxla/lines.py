"""Which line of the person's program is behind what happens now."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType, FrameType

MACHINERY = sys.stdlib_module_names | {
    *("pluggy", "numpy"),
    *("torch", "torch_xla", "functorch", "lightning", "lightning_fabric", "pytorch_lightning"),
}
"""Packages between a person's line and the device."""
OURS = frozenset(
    {"polyxla", "polyxla_bridge", "polyxla_pjrt", "polyxla_precision", "polyxla_sampler", "polyxla_xrt"}
)
BACKWARD = "the backward pass"
"""What is said where torch's own thread runs, in which no line of the program is to be seen."""


def caller() -> str | None:
    """Return ``file:line`` of the innermost frame that is the person's; None if polyxla itself acts.

    Optimizers of torch act for polyxla when a step ends, but what they read is theirs: they are named.
    """
    frame: FrameType | None = sys._getframe(1)
    behind: str | None = None
    while frame is not None and (package := _package(frame)) in OURS | MACHINERY:
        module: str = frame.f_globals.get("__name__", "")
        if package in OURS and module != "polyxla.observe.tracer":
            return behind
        if module.startswith("torch.autograd"):
            behind = BACKWARD
        elif module.startswith("torch.optim.") and module != "torch.optim.optimizer":
            behind = place(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return place(frame.f_code, frame.f_lineno) if frame else BACKWARD


def outside() -> str | None:
    """Return ``file:line`` of the innermost frame outside polyxla, such as that of ``replica.step``.

    None where polyxla's own loop made the call.
    """
    return _outside(sys._getframe(1))


def in_thread(ident: int) -> str | None:
    """Return ``file:line`` of the innermost frame of a thread that is the person's; None without one."""
    return _outside(sys._current_frames().get(ident))


def _outside(frame: FrameType | None) -> str | None:
    while frame is not None and _package(frame) in OURS | MACHINERY:
        if frame.f_globals.get("__name__") == "polyxla.loop":
            return None
        frame = frame.f_back
    return place(frame.f_code, frame.f_lineno) if frame else None


def place(code: CodeType, line: int | None = None) -> str:
    """Return ``file:line``, the file as seen from the working directory where it is below."""
    path = Path(code.co_filename)
    here = Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return f"{os.fspath(shown)}:{line or code.co_firstlineno}"


def _package(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]
