"""The pages name every hook, variable and option, and their Python compiles."""

from __future__ import annotations

import re
import subprocess
import sys
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
TIMEOUT_S = 280
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


READMES = sorted(ROOT.glob("packages/*/README.md"))
# What each example prints; the examples of the other packages take longer.
PRINTED = {
    "bridge": r"tensor\(\[\[4\., 4\.\]\]\)\n",
    "core": r"\[[\d.e-]+, [\d.e-]+\]\n",
    "polyxla": r"(2\.9|3\.0)\d+ (0\.9|1\.0)\d*\n",
    "precision": r"\[torch\.bfloat16, torch\.bfloat16, torch\.float32, torch\.float32\]\n",
    "runtime-pjrt": r"\[\[1\.0, 1\.0\], \[1\.0, 1\.0\]\]\n",
    "runtime-xrt": r"\[\[1\.0, 1\.0\], \[1\.0, 1\.0\]\]\n",
    "sampler": r"0 \[\[2, 3\], \[7, 4\], \[8\]\]\n1 \[\[7, 3\], \[0, 4\], \[2\]\]\n910635848\n",
    "training": r"(2\.9|3\.0)\d+ (0\.9|1\.0)\d*\n",
}
QUICK = {"precision", "sampler"}


@pytest.mark.parametrize(
    "package",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in sorted(PRINTED)],
)
def test_the_example_of_a_readme_runs(package: str, clean_environ: dict[str, str], tmp_path: Path) -> None:
    text = (ROOT / "packages" / package / "README.md").read_text()
    script = tmp_path / "example.py"
    script.write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env=clean_environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(PRINTED[package], done.stdout), done.stdout


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_a_readme_says_how_to_install_and_links_to_the_documentation(path: Path) -> None:
    text = path.read_text()
    assert f"./packages/{path.parent.name}" in text
    pages = re.findall(r"\]\(https://polyxla\.github\.io/polyxla/([\w-]+)/", text)
    assert pages
    assert [name for name in pages if not (ROOT / "docs" / f"{name}.md").is_file()] == []
    assert re.findall(r"\]\((?!https://)", text) == [], "a relative link leads nowhere on a package index"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [path.name for path in PAGES if path.name not in navigation] == []


def test_the_tests_that_the_features_page_names_exist() -> None:
    directories = [ROOT / "integration", *(ROOT / "packages").glob("*/tests")]
    files = [path for directory in directories for path in directory.rglob("test_*.py")]
    kit = (ROOT / "packages/testing/src/polyxla_testing/conformance.py").read_text()
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
