"""The releases of torch, torch_xla, torch_tpu and libtpu that fit together; nothing of them is imported."""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from polyxla.errors import pip_install
from polyxla.tpu import env

RIGHT_PAIR = "pip install 'torch==2.9.1' 'torch_xla==2.9.0'"
"""The command that installs a tested pair. torch_xla 2.9.0 is the last release of torch_xla."""

Release = tuple[int, int, int]


class Problem(NamedTuple):
    """Why torch_xla cannot be imported here, and what to do."""

    what: str
    fix: str


def import_problem() -> Problem | None:
    """Return why torch_xla cannot be imported here; None if it can.

    It is built against one minor release of torch. With another one, its import fails in the dynamic linker
    with an undefined symbol, an error that does not name the cause. So it does where Python's shared library
    is missing: Debian's and Ubuntu's ``python3`` need none, and leave it to another package.
    """
    # Read from metadata: importing a pair that does not fit would fail in the dynamic linker.
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
    # Loading it is the only way to ask the dynamic linker, which also searches its cache and LD_LIBRARY_PATH.
    # The interpreter itself may be linked statically.
    try:
        ctypes.CDLL(name)
    except OSError:
        return Problem(
            f"torch_xla needs Python's shared library {name}, and it is not found",
            f"On Debian and Ubuntu: apt-get install lib{python}. For another Python, add the directory of "
            f"{name} to LD_LIBRARY_PATH.",
        )
    return None


@dataclass(frozen=True)
class LibtpuReleases:
    """The releases of libtpu that work with a framework.

    Patches such as 0.0.21.1 count as the release that they patch.

    Attributes:
        framework: the framework's distribution.
        first: the oldest of them.
        last: the newest of them; None if there is no limit.
        reason: why others do not work, in a sentence without its full stop.
        fix: how to install one of them, in a sentence.
    """

    framework: str
    first: Release
    last: Release | None
    reason: str
    fix: str

    def problem(self, environ: Mapping[str, str]) -> str | None:
        """Return why the framework does not work with the installed libtpu; None if it does, or may.

        A library that ``TPU_LIBRARY_PATH`` names is not checked, and neither is one without metadata.
        """
        installed = _version("libtpu")
        if environ.get(env.TPU_LIBRARY_PATH) or installed is None or self._has(installed):
            return None
        return f"libtpu {installed} does not fit {self.framework} {_version(self.framework)}, {self.reason}"

    def _has(self, installed: str) -> bool:
        # Nightly builds have suffixes that are not numbers.
        numbers = tuple(int(part) for part in installed.split(".")[:3] if part.isdecimal())
        return self.first <= numbers and (self.last is None or numbers <= self.last)


FOR_TORCH_XLA = LibtpuReleases(
    "torch_xla",
    (0, 0, 21),
    (0, 0, 23),
    "which was built with libtpu 0.0.21: another one may load, and then fail when the first program runs",
    f"Install it: {pip_install('polyxla-runtime-pjrt[tpu]')}",
)
"""The releases that speak PJRT API 0.75, as torch_xla 2.9.0 does.

Source: for 0.0.21, torch_xla's ``setup.py``; for the others, the function tables of the libraries. 0.0.20 has
0.73, 0.0.24 has 0.78. 0.0.52, with 0.117, loads, and then refuses the first execution: "Unexpected
PJRT_ExecuteOptions size".
"""

FOR_TORCH_TPU = LibtpuReleases(
    "torch_tpu",
    (0, 0, 50),
    None,
    "which needs libtpu 0.0.50 or later",
    "Install it: pip install 'libtpu>=0.0.50'",
)
"""Source: the requirements of torch_tpu 0.2.0, which bring libtpu."""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> str:
    # A suffix such as +cpu belongs to the third number.
    return ".".join(version.split(".")[:2])
