"""Checks that the installed torch, torch_xla and libtpu fit together, without importing any of them.

torch_xla is built against one minor release of torch. With another release, `import torch_xla` fails in the
dynamic linker with an undefined symbol, an error that does not name the cause. A libtpu with another PJRT API
loads, and may fail when the first program runs.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from polyxla.errors import pip_install
from polyxla_tpu import env as tpu_env

RIGHT_LIBTPU = "0.0.21"
"""The release of libtpu that torch_xla 2.9.0 was built with. Source: its ``setup.py``."""

FITTING_LIBTPU = (RIGHT_LIBTPU, "0.0.22", "0.0.23")
"""The releases that speak PJRT API 0.75, as torch_xla 2.9.0 does, with their patches such as 0.0.21.1.

Source: the function tables of the libraries. 0.0.20 has 0.73, 0.0.24 has 0.78. 0.0.52, with 0.115, loads, and
then refuses the first execution: "Unexpected PJRT_ExecuteOptions size".
"""

RIGHT_PAIR = "pip install 'torch==2.9.1' 'torch_xla==2.9.0'"
"""The command that installs a tested pair. torch_xla 2.9.0 is the last release of torch_xla."""


def versions_problem() -> str | None:
    """Return why torch_xla cannot be imported here; None if the versions fit."""
    torch, torch_xla = _version("torch"), _version("torch_xla")
    if torch is None or torch_xla is None:
        missing = " and ".join(
            name for name, version in (("torch", torch), ("torch_xla", torch_xla)) if version is None
        )
        return f"{missing} is not installed"
    if _minor(torch) != _minor(torch_xla):
        return (
            f"torch {torch} and torch_xla {torch_xla} do not fit together: "
            f"torch_xla {_minor(torch_xla)} loads only with torch {_minor(torch_xla)}"
        )
    return None


def libtpu_problem(environ: Mapping[str, str]) -> str | None:
    """Return why torch_xla cannot compute with the installed libtpu; None if it can, or if it is not known.

    A library that ``TPU_LIBRARY_PATH`` names is not checked, and neither is one without metadata.
    """
    installed = _version("libtpu")
    if environ.get(tpu_env.TPU_LIBRARY_PATH) or installed is None or _release(installed) in FITTING_LIBTPU:
        return None
    return (
        f"libtpu {installed} does not fit torch_xla {_version('torch_xla')}, which was built with libtpu "
        f"{RIGHT_LIBTPU}: another one may load, and then fail when the first program runs"
    )


def libtpu_fix() -> str:
    """Return the advice that goes with a missing libtpu, or with one that does not fit."""
    return f"Install it: {pip_install('polyxla-runtime-pjrt[tpu]')}"


def _release(version: str) -> str:
    return ".".join(version.split(".")[:3])


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
