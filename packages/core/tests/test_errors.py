"""The commands that errors advise."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from polyxla.errors import pip_install

ROOT = Path(__file__).parents[3]
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))


def test_until_a_release_a_package_is_installed_from_its_directory() -> None:
    assert pip_install("polyxla-training[report]") == "pip install './packages/training[report]'"
    assert pip_install("polyxla-runtime-pjrt") == "pip install ./packages/runtime-pjrt"
    assert pip_install("polyxla-runtime-xrt") == "pip install ./packages/bridge ./packages/runtime-xrt"


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        pytest.param("my%20clone/packages/core", "'{}/my clone/packages/tools'", id="clone"),
        pytest.param("polyxla_core-1.0-py3-none-any.whl", "--find-links dist polyxla-tools", id="wheel"),
        pytest.param(None, "--find-links dist polyxla-tools", id="index"),
    ],
)
def test_elsewhere_packages_come_from_where_the_core_did(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str | None, advice: str
) -> None:
    (tmp_path / "my clone" / "packages" / "core").mkdir(parents=True)
    installed = tmp_path / "polyxla_core-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: polyxla-core\nVersion: 1.0\n")
    if url:
        (installed / "direct_url.json").write_text(f'{{"url": "file://{tmp_path}/{url}"}}')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert pip_install("polyxla-tools") == f"pip install {advice.format(tmp_path)}"


def test_every_advised_package_exists() -> None:
    advised = {
        name for path in SOURCES for name in re.findall(r"""pip_install\(["']([\w-]+)""", path.read_text())
    }
    assert len(advised) >= 4
    for name in {*advised, "polyxla-runtime-xrt"}:
        directories = shlex.split(pip_install(name))[2:]
        assert [path for path in directories if not (ROOT / path / "pyproject.toml").is_file()] == []


def test_no_other_line_advises_to_install_a_package_of_ours() -> None:
    assert SOURCES
    lines = [(path.name, line) for path in SOURCES for line in path.read_text().splitlines()]
    assert [line for line in lines if re.search(r"pip install ['\"]?(polyxla|\./packages)", line[1])] == []
