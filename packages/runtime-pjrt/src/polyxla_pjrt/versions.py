"""Checks that torch_xla can be imported here, without importing it.

torch_xla is built against one minor release of torch. With another release, its import fails in the dynamic
linker with an undefined symbol, an error that does not name the cause. So it does where Python's shared
library is missing: Debian's and Ubuntu's ``python3`` need none, and leave it to another package.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
from typing import NamedTuple

RIGHT_PAIR = "pip install 'torch==2.9.1' 'torch_xla==2.9.0'"
"""The command that installs a tested pair. torch_xla 2.9.0 is the last release of torch_xla."""


class Problem(NamedTuple):
    """Why torch_xla cannot be imported here, and what to do."""

    what: str
    fix: str


def import_problem() -> Problem | None:
    """Return why torch_xla cannot be imported here; None if it can."""
    torch, torch_xla = _version("torch"), _version("torch_xla")
    right_pair = f"Install a pair that fits: {RIGHT_PAIR}"
    if torch is None or torch_xla is None:
        missing = [name for name, version in (("torch", torch), ("torch_xla", torch_xla)) if version is None]
        return Problem(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed", right_pair
        )
    if _minor(torch) != _minor(torch_xla):
        return Problem(
            f"torch {torch} and torch_xla {torch_xla} do not fit together: "
            f"torch_xla {_minor(torch_xla)} loads only with torch {_minor(torch_xla)}",
            right_pair,
        )
    return library_problem(f"python{sys.version_info.major}.{sys.version_info.minor}")


def library_problem(python: str) -> Problem | None:
    """Return why the dynamic linker does not find the shared library of `python`; None if it does."""
    name = f"lib{python}.so.1.0"
    try:
        ctypes.CDLL(name)
    except OSError:
        return Problem(
            f"torch_xla needs Python's shared library {name}, and it is not found",
            f"On Debian and Ubuntu: apt-get install lib{python}. For another Python, add the directory of "
            f"{name} to LD_LIBRARY_PATH.",
        )
    return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
