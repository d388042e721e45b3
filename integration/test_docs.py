"""The pages name every hook, variable and option, and their Python compiles."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

import polyxla.env
import polyxla.hookspecs
import polyxla_bridge.env
import polyxla_pjrt.env
import polyxla_training.hookspecs
import polyxla_xrt.env

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
HOOKSPECS = [polyxla.hookspecs, polyxla_training.hookspecs]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


@pytest.mark.parametrize(
    "hook", [name for specs in HOOKSPECS for name in vars(specs) if name.startswith("polyxla_")]
)
def test_every_hook_is_on_the_plugins_page(hook: str) -> None:
    assert f"`{hook}(" in page("plugins.md")


@pytest.mark.parametrize("module", [polyxla.env, polyxla_bridge.env, polyxla_pjrt.env, polyxla_xrt.env])
def test_every_variable_is_on_the_environment_page(module: ModuleType) -> None:
    names = [name for name, value in vars(module).items() if name.isupper() and value == name]
    assert names
    assert [name for name in names if f"`{name}`" not in page("environment.md")] == []


@pytest.mark.parametrize("path", [*PAGES, ROOT / "README.md"], ids=lambda path: path.name)
def test_python_in_the_pages_compiles(path: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        if "--8<--" not in block:
            compile(block, path.name, "exec")


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [path.name for path in PAGES if path.name not in navigation] == []


def test_the_tests_that_the_features_page_names_exist() -> None:
    directories = [ROOT / "integration", *(ROOT / "packages").glob("*/tests")]
    files = [path for directory in directories for path in directory.rglob("test_*.py")]
    kit = (ROOT / "packages/core/src/polyxla/testing/conformance.py").read_text()
    sources = kit + "".join(path.read_text() for path in files)
    named = set(re.findall(r"\btest_\w+", page("features.md"))) - {path.stem for path in files}
    assert [name for name in sorted(named) if f"def {name}(" not in sources] == []


def test_the_files_that_the_features_page_names_exist() -> None:
    named = re.findall(r"`((?:packages|integration)/[^`:]+)", page("features.md"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_files_that_the_architecture_page_names_exist() -> None:
    directories = [ROOT, *ROOT.glob("packages/*/src/*")]
    named = re.findall(r"`([\w/.]+\.(?:py|c|proto))`", page("architecture.md"))
    assert named
    assert [name for name in named if not any((directory / name).exists() for directory in directories)] == []
