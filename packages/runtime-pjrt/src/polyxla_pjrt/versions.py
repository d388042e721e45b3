"""Checks that the installed torch and torch_xla fit together, without importing them.

torch_xla is built against one minor release of torch. With another release, `import torch_xla` fails in the
dynamic linker with an undefined symbol, an error that does not name the cause.
"""

from __future__ import annotations

import importlib.metadata

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


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
