"""The installed distributions, from their metadata: nothing is imported."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from polyxla.plugin import FOR_TORCH_TPU, FOR_TORCH_XLA

FRAMEWORKS = ("torch", "torch_xla", "torch_tpu", "libtpu", "jax", "jaxlib", "numpy")
"""Distributions of others whose versions decide whether training works."""
_OURS = "polyxla"


class Unfit(NamedTuple):
    """Why the installed libtpu does not work with the installed framework, and what to do."""

    reason: str
    fix: str


@dataclass(frozen=True)
class PackageFacts:
    """The installed distributions that matter.

    Attributes:
        python: the version of Python.
        requires_python: which versions polyxla supports, such as ``>=3.11,<3.14``; empty if unknown.
        installed: version by name, of polyxla's distributions, the frameworks, and what they require.
        requirements: for each of polyxla's distributions and frameworks, what it requires, as in metadata.
        libtpu: why libtpu does not fit the framework; None if it does, or one of them is not installed.
    """

    python: str
    requires_python: str
    installed: Mapping[str, str]
    requirements: Mapping[str, tuple[str, ...]]
    libtpu: Unfit | None


def gather_packages(environ: Mapping[str, str]) -> PackageFacts:
    """Read the metadata of the installed distributions.

    Args:
        environ: the environment; ``TPU_LIBRARY_PATH`` replaces libtpu's distribution.
    """
    versions = {
        name: one.version for one in reversed([*importlib.metadata.distributions()]) if (name := _name(one))
    }
    ours = sorted(name for name in versions if name.startswith(_OURS))
    named = [*ours, *(name for name in map(normal, FRAMEWORKS) if name in versions)]
    return PackageFacts(
        python=platform.python_version(),
        requires_python=_requires_python(),
        installed=versions,
        requirements={name: tuple(importlib.metadata.requires(name) or ()) for name in named},
        libtpu=_unfit_libtpu(environ, versions),
    )


def normal(name: str) -> str:
    """Return a distribution's name as an index spells it, such as ``torch-xla``.

    Source: the specification of Python's package names.
    """
    return name.lower().replace("_", "-").replace(".", "-")


def _name(found: importlib.metadata.Distribution) -> str:
    # A directory of metadata that an interrupted pip left behind has no name.
    name: str | None = found.metadata["Name"]
    return normal(name) if name and found.version else ""


def _requires_python() -> str:
    try:
        return importlib.metadata.metadata("polyxla-core")["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def _unfit_libtpu(environ: Mapping[str, str], versions: Mapping[str, str]) -> Unfit | None:
    for releases in (FOR_TORCH_XLA, FOR_TORCH_TPU):
        if normal(releases.framework) in versions and (reason := releases.problem(environ)):
            return Unfit(reason, releases.fix)
    return None
