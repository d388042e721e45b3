"""Finding the line of the user's program that led to the current call, for messages."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from types import CodeType, FrameType, TracebackType

from polyxla.entry_points import entry_points

LIBRARIES = sys.stdlib_module_names | {
    # typing_extensions: its wrapper stands around torch_xla's deprecated functions.
    *("pluggy", "numpy", "polyxla_testing", "typing_extensions"),
    # The bridge imports and calls them.
    *("jax", "jaxlib", "ml_dtypes"),
    *("torch", "torch_tpu", "torch_xla", "functorch", "lightning", "lightning_fabric", "pytorch_lightning"),
}
"""Packages that may stand between the user's line and the device."""
PLUGIN_GROUPS = ("polyxla", "polyxla.runtimes", "polyxla.hookspecs", "torch_xla.plugins")
"""Entry-point groups of plugins; a package of the user's may be in them, too."""
BACKWARD = "the backward pass"
"""Stands for a line where torch's autograd thread runs, whose stack holds no frame of the program."""


def add_runtime(module: str) -> None:
    """Count the package that holds a runtime's plugin module as polyxla's."""
    _runtimes.add(f"{module.rpartition('.')[0] or module}.")


_runtimes: set[str] = set()


@functools.cache
def own_packages() -> frozenset[str]:
    """Return the import names of polyxla's own distributions."""
    points = (point for group in PLUGIN_GROUPS for point in entry_points(group))
    ours = (point.module for point in points if point.dist and point.dist.name.startswith("polyxla-"))
    # The distributions' names tell ours from a third party's plugin, which is in the same groups.
    return frozenset({"polyxla", *(module.partition(".")[0] for module in ours)})


def is_polyxlas(frame: FrameType) -> bool:
    """Return whether a frame belongs to one of polyxla's distributions or to the runtime in use."""
    return _package(frame) in own_packages() or f"{_module(frame)}.".startswith(tuple(_runtimes))


def caller(observer: str = "") -> str | None:
    """Return ``file:line`` of the user's innermost frame; None if polyxla acts on its own behalf.

    For a tensor that a torch optimizer reads inside `polyxla.Replica.step`, the optimizer's line is returned.

    Args:
        observer: name of the module that observes the call; its frames do not count as polyxla's.
    """
    # Walk outwards until the user's line, or until polyxla's own code: a call that polyxla makes on its own
    # behalf has no line of the user's, except one that torch made in between.
    frame: FrameType | None = sys._getframe(1)
    behind: str | None = None
    while frame is not None and not _is_users(frame):
        module = _module(frame)
        if module != observer and is_polyxlas(frame):
            return behind
        if module.startswith("torch.autograd"):
            behind = BACKWARD
        elif module.startswith("torch.optim.") and module != "torch.optim.optimizer":
            behind = location(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return location(frame.f_code, frame.f_lineno) if frame else BACKWARD


def user_line(thread: int | None = None) -> str | None:
    """Return ``file:line`` of the user's innermost frame; None if there is none.

    Args:
        thread: a thread's identifier; default: the calling thread.
    """
    frame = sys._getframe(1) if thread is None else sys._current_frames().get(thread)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return location(frame.f_code, frame.f_lineno) if frame else None


def raised_at(trace: TracebackType | None) -> str | None:
    """Return ``file:line`` of the user's innermost frame in a traceback; None if there is none."""
    line = None
    while trace is not None:
        if _is_users(trace.tb_frame):
            line = location(trace.tb_frame.f_code, trace.tb_lineno)
        trace = trace.tb_next
    return line


def location(code: CodeType, line: int | None = None) -> str:
    """Return ``file:line``, with the path relative to the working directory if the file is below it.

    Args:
        code: names the file.
        line: the line; default: the first line of `code`.
    """
    return f"{short(code.co_filename)}:{line or code.co_firstlineno}"


def short(file: str) -> str:
    """Return a path relative to the working directory if it is below it."""
    # Users recognise the files of their own project by the relative path.
    path = Path(file)
    try:
        here = Path.cwd()
    # The program may have deleted its working directory; a message must not fail for that.
    except FileNotFoundError:
        return file
    return os.fspath(path.relative_to(here) if path.is_relative_to(here) else path)


def _is_users(frame: FrameType) -> bool:
    # Replica processes are started with `python -c`, whose code has this name.
    if frame.f_code.co_filename == "<string>":
        return False
    return _package(frame) not in LIBRARIES and not is_polyxlas(frame)


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def _package(frame: FrameType) -> str:
    return _module(frame).partition(".")[0]
