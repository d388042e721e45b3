"""Whether the installed versions fit together."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from polyxla.plugin import pip_install
from polyxla_tools.doctor.facts.packages import FRAMEWORKS, PackageFacts, normal
from polyxla_tools.doctor.findings import Finding, note, ok, problem


def check_python(facts: PackageFacts) -> list[Finding]:
    """Check that polyxla supports this Python."""
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
    if required.marker and not required.marker.evaluate({"extra": ""}):
        return False
    version = facts.installed.get(normal(required.name))
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
    """List the frameworks; whether a runtime works with them is for the runtime to say."""
    if any(name in facts.installed for name in ("torch-xla", "torch-tpu")):
        return [ok("frameworks", ", ".join(framework_versions(facts)))]
    fix = f"Install a runtime, which brings them: {pip_install('polyxla-runtime-pjrt')}"
    return [problem("frameworks", "neither torch_xla nor torch_tpu is installed", fix)]
