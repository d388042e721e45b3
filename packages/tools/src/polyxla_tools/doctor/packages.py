"""The installed distributions, from their metadata, and whether their versions fit together."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from polyxla.plugin import FOR_TORCH_TPU, FOR_TORCH_XLA, pip_install
from polyxla_tools.doctor.findings import Finding, note, ok, problem

FRAMEWORKS = ("torch", "torch_xla", "torch_tpu", "libtpu", "jax", "jaxlib", "numpy")
"""Distributions of other projects: training works only with certain versions of them."""
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
        name: found.version
        # Of two distributions with one name, Python imports the first on the path: it must be set last.
        for found in reversed([*importlib.metadata.distributions()])
        if (name := _name(found))
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
    # Each framework needs its own libtpu; the environment has one of them.
    for releases in (FOR_TORCH_XLA, FOR_TORCH_TPU):
        if normal(releases.framework) in versions and (reason := releases.problem(environ)):
            return Unfit(reason, releases.fix)
    return None


def check_python(facts: PackageFacts) -> list[Finding]:
    """Check that polyxla supports this Python."""
    # pip has checked this when it installed polyxla; a copied or shared environment is not checked.
    if SpecifierSet(facts.requires_python).contains(facts.python, prereleases=True):
        return [ok("python", f"Python {facts.python}")]
    found = f"Python {facts.python} does not fit polyxla, which needs {facts.requires_python}"
    return [problem("python", found, "Make an environment with another Python: uv venv --python 3.12.")]


def check_requirements(facts: PackageFacts) -> list[Finding]:
    """Check that polyxla's distributions and the frameworks have the versions that they require."""
    unmet: dict[str, list[str]] = {}
    for name, texts in facts.requirements.items():
        for text in texts:
            if _is_unmet(facts, text):
                unmet.setdefault(text, []).append(f"{name} {facts.installed[name]}")
    if unmet:
        return [_unmet(facts, Requirement(text), names) for text, names in unmet.items()]
    ours = {version for name, version in facts.installed.items() if name.startswith("polyxla")}
    return [ok("packages", f"polyxla {', '.join(sorted(ours))}; the versions that it requires are installed")]


def _is_unmet(facts: PackageFacts, text: str) -> bool:
    try:
        required = Requirement(text)
    except InvalidRequirement:
        return False
    # Extras are optional: their requirements do not count as unmet.
    if required.marker and not required.marker.evaluate({"extra": ""}):
        return False
    version = facts.installed.get(normal(required.name))
    # Prereleases count: nightly builds of torch_xla and libtpu are installed on purpose.
    return not version or not required.specifier.contains(version, prereleases=True)


def _unmet(facts: PackageFacts, required: Requirement, names: list[str]) -> Finding:
    version = facts.installed.get(normal(required.name))
    missing = f"{required.name} {version} is installed" if version else "it is not installed"
    needs = f"{' and '.join(names)}: {required.name}{required.specifier} is required"
    return problem("packages", f"{needs}, and {missing}", f"Install it: {_install(required)}")


def _install(required: Requirement) -> str:
    if required.name.startswith("polyxla-"):
        return pip_install(required.name)
    return shlex.join(["pip", "install", f"{required.name}{required.specifier}"])


def check_libtpu(facts: PackageFacts, *, is_needed: bool) -> list[Finding]:
    """Check that libtpu works with the framework.

    Args:
        facts: the installed distributions.
        is_needed: whether this host has TPU chips.
    """
    if facts.libtpu is None:
        version = facts.installed.get("libtpu")
        return [ok("libtpu", f"libtpu {version} fits the framework")] if version else []
    if is_needed:
        return [problem("libtpu", *facts.libtpu)]
    return [note("libtpu", f"{facts.libtpu.reason}; on this machine only `polyxla fits` uses it")]


def framework_versions(facts: PackageFacts) -> Iterator[str]:
    """Yield name and version of each installed framework, such as ``torch 2.9.1``."""
    for name in FRAMEWORKS:
        if version := facts.installed.get(normal(name)):
            yield f"{name} {version}"


def check_frameworks(facts: PackageFacts) -> list[Finding]:
    """List the frameworks; each runtime reports by itself whether it works with them."""
    if any(name in facts.installed for name in ("torch-xla", "torch-tpu")):
        return [ok("frameworks", ", ".join(framework_versions(facts)))]
    fix = f"Install a runtime, which brings them: {pip_install('polyxla-runtime-pjrt')}"
    return [problem("frameworks", "neither torch_xla nor torch_tpu is installed", fix)]
