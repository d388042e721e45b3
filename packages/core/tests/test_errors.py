"""The commands that errors advise."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from polyxla import errors
from polyxla.errors import pip_install

ROOT = Path(__file__).parents[3]
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))


def test_until_a_release_a_package_is_installed_from_its_directory() -> None:
    assert pip_install("polyxla-training[report]") == "pip install './packages/training[report]'"
    assert pip_install("polyxla-runtime-pjrt") == "pip install ./packages/tpu ./packages/runtime-pjrt"
    assert (
        pip_install("polyxla-runtime-xrt")
        == "pip install ./packages/tpu ./packages/bridge ./packages/runtime-xrt"
    )


def test_one_line_changes_with_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "INSTALL_PREFIX", "polyxla-")
    assert pip_install("polyxla-training[report]") == "pip install 'polyxla-training[report]'"
    assert pip_install("polyxla-sampler") == "pip install polyxla-sampler"


def test_every_advised_package_exists() -> None:
    advised = {
        name for path in SOURCES for name in re.findall(r"""pip_install\(["']([\w-]+)""", path.read_text())
    }
    assert len(advised) >= 4
    for name in {*advised, "polyxla-runtime-xrt"}:
        directories = shlex.split(pip_install(name))[2:]
        assert [one for one in directories if not (ROOT / one / "pyproject.toml").is_file()] == []


def test_no_other_line_advises_to_install_a_package_of_ours() -> None:
    assert SOURCES
    lines = [(path.name, line) for path in SOURCES for line in path.read_text().splitlines()]
    assert [one for one in lines if re.search(r"pip install ['\"]?(polyxla|\./packages)", one[1])] == []
