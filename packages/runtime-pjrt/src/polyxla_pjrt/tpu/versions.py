"""Whether the installed torch and torch_xla fit together, found out without importing either.

torch_xla is built against one minor release of torch; with another, `import torch_xla` dies in the
dynamic linker with an undefined symbol, which tells a person nothing.
"""

from __future__ import annotations

import importlib.metadata

RIGHT_PAIR = "pip install 'torch==2.9.1' 'torch_xla==2.9.0'"
"""What to write to get versions that work. Source: tested here; torch_xla 2.9.0 is its last release."""


def versions_problem() -> str | None:
    """Return why torch_xla cannot be imported here; None where nothing speaks against it."""
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
