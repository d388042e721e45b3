"""Versions that do not fit are named before torch_xla's import dies in the linker."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from polyxla_pjrt.tpu.versions import versions_problem
from polyxla_testing import PluginInstaller


def test_the_installed_pair_fits() -> None:
    assert versions_problem() is None


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
    found = versions_problem()
    assert (found is None) == (problem is None)
    assert problem is None or (found is not None and problem in found)


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
    assert versions_problem() == "torch and torch_xla is not installed"
