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

from polyxla import UsageError
from polyxla.plugin import FOR_TORCH_XLA, AttachedChip, Claim, Discovery, import_problem
from polyxla_pjrt.discovery import with_chips
from polyxla_testing import PluginInstaller


def test_the_installed_pair_fits() -> None:
    assert import_problem() is None


def test_the_command_line_prints_what_to_install(install_plugin: PluginInstaller) -> None:
    install_plugin.metadata("torch", version="2.13.0")
    command = [sys.executable, "-m", "polyxla", "devices", "--runtime", "pjrt", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "torch 2.13.0 and torch_xla 2.9.0 do not fit together" in json.loads(done.stdout)["error"]
    assert "pip install 'torch==2.9.1' 'torch_xla==2.9.0'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_tpu_with_another_libtpu_is_refused(install_plugin: PluginInstaller) -> None:
    install_plugin.metadata("libtpu", version="0.0.52")
    (install_plugin.directory / "libtpu.py").touch()
    bare = Discovery(Claim.ATTACHED, "4 TPU chip(s) attached", "TPU")
    with pytest.raises(UsageError, match=r"libtpu 0\.0\.52 does not fit torch_xla") as caught:
        with_chips(bare, {}, (AttachedChip("v4", "0000:00:05.0"),))
    assert caught.value.fix == FOR_TORCH_XLA.fix


def test_torch_xla_itself_asks_for_this_libtpu() -> None:
    requirements = importlib.metadata.requires("torch_xla") or []
    (libtpu,) = (requirement for requirement in requirements if requirement.startswith("libtpu"))
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
