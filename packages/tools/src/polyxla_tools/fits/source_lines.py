"""The lines of a script that its programs come from."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from polyxla.plugin import LIBRARIES, own_packages, short
from polyxla_bridge.programs import hlo

Frame = tuple[str, int]
"""A file and a line."""


def innermost_user_line(stack: Iterable[Frame]) -> str | None:
    """Return ``file:line`` of the first frame that belongs to no library; None if all do."""
    return next((show(frame) for frame in stack if is_users(frame[0])), None)


def program_line(module: bytes) -> str | None:
    """Return ``file:line`` of the script from which most of a program's operations come.

    Of the lines that call each other it is the outermost: the one of a training step, not of a layer.

    Args:
        module: a serialised HloModuleProto, with stacks in its metadata (``XLA_IR_DEBUG=1``).
    """
    lines = Counter(outermost for stack in hlo.stacks(module).values() if (outermost := _outermost(stack)))
    return lines.most_common(1)[0][0] if lines else None


def operation_line(module: bytes, instruction: str) -> str | None:
    """Return ``file:line`` of the script that an instruction comes from; None if it is not known."""
    return innermost_user_line(hlo.stacks(module).get(instruction, ()))


def _outermost(stack: list[Frame]) -> str | None:
    users = [frame for frame in stack if is_users(frame[0])]
    return show(users[-1]) if users else None


@functools.cache
def is_users(file: str) -> bool:
    """Return whether a file belongs to neither Python nor a library between the script and the device."""
    if file.startswith("<") or not file:
        return False
    package = next(_packages(file), "")
    return package not in LIBRARIES and package not in own_packages()


def _packages(file: str) -> Iterator[str]:
    """Yield the top-level package of a file, by the longest import path that contains it."""
    for entry in sorted(filter(None, sys.path), key=len, reverse=True):
        if Path(file).is_relative_to(entry):
            yield Path(file).relative_to(entry).parts[0].removesuffix(".py")


def show(frame: Frame) -> str:
    """Return ``file:line``, with the path relative to the working directory if the file is below it."""
    file, line = frame
    return f"{short(file)}:{line}"
