"""The packages fit together: one version, one license, dependencies in one direction."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
# The packages of this repository that a package may depend on. The other direction would make a cycle.
ALLOWED = {
    "bridge": set(),
    "core": set(),
    "examples": {"core", "training"},
    # The umbrella: requirements, no code.
    "polyxla": {
        "core",
        "pod",
        "precision",
        "runtime-pjrt",
        "runtime-torchtpu",
        "runtime-xrt",
        "sampler",
        "tools",
        "training",
    },
    "pod": {"core"},
    "precision": set(),
    "runtime-pjrt": {"bridge", "core"},
    "runtime-torchtpu": {"bridge", "core"},
    "runtime-xrt": {"bridge", "core"},
    "sampler": set(),
    "testing": {"bridge", "core"},
    "tools": {"bridge", "core"},
    "training": {"core"},
}
# The releases of torch that a package works with: torch_xla was built with one, TorchTPU begins with 2.11.
NEEDS_TORCH = {
    "examples": ">=2.9,<2.16",
    "runtime-pjrt": "==2.9.*",
    "runtime-torchtpu": ">=2.11,<2.16",
    "runtime-xrt": "==2.9.*",
    "sampler": ">=2.9,<2.16",
    "training": ">=2.9,<2.16",
}
# Never in one environment with torch_xla, where these tests run.
INSTALLED = [package for package in PACKAGES if package != "runtime-torchtpu"]


def project(package: str) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())[
        "project"
    ]
    return table


def requirements(package: str) -> dict[str, str]:
    """Return the version specifier of each required name, without extras."""
    table = project(package)
    lists = [table["dependencies"], *table.get("optional-dependencies", {}).values()]
    parts = (
        re.fullmatch(r"([\w.-]+)(?:\[[^]]*\])?(.*)", requirement) for part in lists for requirement in part
    )
    return {match[1].replace("_", "-"): match[2] for match in parts if match}


def modules(package: str) -> list[Path]:
    return [path.parent for path in (ROOT / "packages" / package / "src").glob("*/__init__.py")]


def test_all_packages_share_one_version() -> None:
    assert len({project(package)["version"] for package in PACKAGES}) == 1


@pytest.mark.parametrize("package", INSTALLED)
def test_the_installed_version_is_the_declared_one(package: str) -> None:
    table = project(package)
    assert importlib.metadata.version(table["name"]) == table["version"]


@pytest.mark.parametrize("package", PACKAGES)
def test_required_siblings_are_allowed_and_pinned(package: str) -> None:
    ours = {
        name.removeprefix("polyxla-"): pin
        for name, pin in requirements(package).items()
        if name.startswith("polyxla-")
    }
    assert set(ours) <= ALLOWED[package]
    assert set(ours.values()) <= {f"=={project(package)['version']}"}


@pytest.mark.parametrize("package", PACKAGES)
def test_only_packages_that_need_torch_pin_it(package: str) -> None:
    needs = {name: pin for name, pin in requirements(package).items() if name in ("torch", "torch-xla")}
    assert needs.get("torch") == NEEDS_TORCH.get(package)
    assert needs.get("torch-xla", "==2.9.*") == "==2.9.*"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_complete(package: str) -> None:
    directory = ROOT / "packages" / package
    table = project(package)
    assert (directory / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert table["name"] == ("polyxla" if package == "polyxla" else f"polyxla-{package}")
    assert (directory / "README.md").read_text().startswith(f"# {table['name']}\n")
    assert table["license"] == "Apache-2.0"
    assert table["requires-python"] == ">=3.11,<3.14"
    assert len(modules(package)) == (package != "polyxla")
    assert all((module / "py.typed").is_file() for module in modules(package))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_where_it_comes_from(package: str) -> None:
    table = project(package)
    address = "https://github.com/polyxla/polyxla"
    assert table["urls"] == {
        "Homepage": address,
        "Documentation": "https://polyxla.github.io/polyxla/",
        "Source": f"{address}/tree/main/packages/{package}",
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
    }
    assert table["license-files"] == ["LICENSE"]
    assert len(table["keywords"]) >= 4
    assert "Operating System :: POSIX :: Linux" in table["classifiers"]


def test_the_umbrella_installs_what_its_page_says() -> None:
    extras: dict[str, list[str]] = project("polyxla")["optional-dependencies"]
    text = (ROOT / "packages" / "polyxla" / "README.md").read_text()
    needs = [required.partition("==")[0] for required in project("polyxla")["dependencies"]]
    assert sorted(needs) == sorted(re.findall(r"`(polyxla-[\w-]+)`", text.partition("```")[0]))
    assert sorted(extras) == sorted(re.findall(r"^\| `\[(\w+)\]` \|", text, re.MULTILINE))
    # A TPU VM adds libtpu, a Ray cluster has a release of its own, and TorchTPU needs another torch.
    others = {required for name in ("replicas", "report", "xrt") for required in extras[name]}
    assert set(extras["all"]) == others


def test_the_script_for_a_lent_machine_packs_what_its_stages_import() -> None:
    script = (ROOT / "benchmarks" / "device.py").read_text()
    stages = script + (ROOT / "packages" / "bridge" / "tests" / "test_gpu.py").read_text()
    imported = set(re.findall(r"(?:from|import) (polyxla_\w+)", stages))
    (packed,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(script).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PACKAGES"
    )
    assert "polyxla_testing" in imported
    assert imported <= {path.name for package in packed for path in modules(package)}


def test_each_entry_point_is_installed_once() -> None:
    for group in ("polyxla", "polyxla.hookspecs", "polyxla.runtimes"):
        declared = {
            (name, value)
            for package in INSTALLED
            for name, value in project(package).get("entry-points", {}).get(group, {}).items()
        }
        installed = [(point.name, point.value) for point in importlib.metadata.entry_points(group=group)]
        assert sorted(installed) == sorted(declared)


def test_ci_runs_the_command_of_the_readme() -> None:
    """CI and a new contributor run the same line, so the README stays correct."""
    command = next(
        line.removesuffix(" || status=$?")
        for line in (ROOT / ".ci" / "run").read_text().splitlines()
        if ".venv/bin/nox" in line
    )
    fenced = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in fenced for line in block.splitlines()]
    assert command in lines


def test_no_committed_file_names_one_machine() -> None:
    script = ROOT / ".ci" / "tracked.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
