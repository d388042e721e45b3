"""Versions that do not fit are named before torch_xla's import dies in the linker."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker

from polyxla import Claim, Discovery, UsageError
from polyxla_pjrt.cores import with_devices
from polyxla_pjrt.versions import import_problem, library_problem
from polyxla_testing import PluginInstaller
from polyxla_tpu.chips import AttachedChip
from polyxla_tpu.libtpu import FOR_TORCH_XLA


def test_the_installed_pair_fits() -> None:
    assert import_problem() is None


@pytest.mark.parametrize(
    ("torch", "torch_xla", "problem"),
    [
        ("2.9.1", "2.9.0", None),
        ("2.9.1+cpu", "2.9.0", None),
        ("2.13.0", "2.9.0", "torch 2.13.0 and torch_xla 2.9.0 do not fit together"),
        ("2.8.0", "2.9.0", "torch_xla 2.9 loads only with torch 2.9"),
        ("2.9.1", "2.10.0", "torch_xla 2.10 loads only with torch 2.10"),
    ],
)
def test_a_pair_that_does_not_fit_is_described(
    install_plugin: PluginInstaller, torch: str, torch_xla: str, problem: str | None
) -> None:
    install_plugin.metadata("torch", version=torch)
    install_plugin.metadata("torch_xla", version=torch_xla)
    found = import_problem()
    assert (found is None) == (problem is None)
    assert problem is None or (found is not None and problem in found.what)


def test_the_command_line_prints_what_to_install(install_plugin: PluginInstaller) -> None:
    install_plugin.metadata("torch", version="2.13.0")
    command = [sys.executable, "-m", "polyxla", "devices", "--runtime", "pjrt", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "torch 2.13.0 and torch_xla 2.9.0 do not fit together" in json.loads(done.stdout)["error"]
    assert "pip install 'torch==2.9.1' 'torch_xla==2.9.0'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_torch_xla_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    found = import_problem()
    assert found is not None
    assert found.what == "torch and torch_xla are not installed"


def test_a_missing_shared_library_of_python_is_named_with_its_package() -> None:
    found = library_problem("python3.99")
    assert found is not None
    assert found.what == "torch_xla needs Python's shared library libpython3.99.so.1.0, and it is not found"
    assert found.fix.startswith("On Debian and Ubuntu: apt-get install libpython3.99.")


def test_a_tpu_with_another_libtpu_is_refused(install_plugin: PluginInstaller) -> None:
    install_plugin.metadata("libtpu", version="0.0.52")
    (install_plugin.directory / "libtpu.py").touch()
    bare = Discovery(Claim.ATTACHED, "4 TPU chip(s) attached", "TPU")
    with pytest.raises(UsageError, match=r"libtpu 0\.0\.52 does not fit torch_xla") as caught:
        with_devices(bare, {}, (AttachedChip("v4", "0000:00:05.0"),))
    assert caught.value.fix == FOR_TORCH_XLA.fix


def test_torch_xla_itself_asks_for_this_libtpu() -> None:
    requirements = importlib.metadata.requires("torch_xla") or []
    (libtpu,) = (one for one in requirements if one.startswith("libtpu"))
    oldest = ".".join(map(str, FOR_TORCH_XLA.first))
    assert libtpu.partition(";")[0].strip() == f"libtpu=={oldest}"


def test_the_extra_installs_a_libtpu_that_fits_for_every_python() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    versions = {}
    for requirement in project["optional-dependencies"]["tpu"]:
        libtpu, _, condition = requirement.partition(";")
        for python in ("3.11", "3.12", "3.13"):
            if Marker(condition).evaluate({"python_version": python}):
                versions[python] = libtpu.strip()
    # 0.0.21 has no wheel for Python 3.13.
    assert versions == {"3.11": "libtpu==0.0.21", "3.12": "libtpu==0.0.21", "3.13": "libtpu==0.0.21.1"}
