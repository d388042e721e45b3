"""Versions that do not fit are named before an import or a first program fails."""

from __future__ import annotations

import pytest

from polyxla.tpu.versions import FOR_TORCH_TPU, FOR_TORCH_XLA, import_problem, library_problem
from polyxla_testing import PluginInstaller


@pytest.mark.parametrize("version", ["0.0.21", "0.0.21.1", "0.0.23.1", "0.0.21.dev20250813+nightly"])
def test_a_libtpu_with_the_api_of_torch_xla_fits(install_plugin: PluginInstaller, version: str) -> None:
    install_plugin.metadata("libtpu", version=version)
    assert FOR_TORCH_XLA.problem({}) is None


@pytest.mark.parametrize("version", ["0.0.52", "0.0.2", "0.0.20", "0.0.24", "0.1.21"])
def test_another_libtpu_is_named_with_the_right_one(install_plugin: PluginInstaller, version: str) -> None:
    install_plugin.metadata("libtpu", version=version)
    install_plugin.metadata("torch_xla", version="2.9.0")
    found = FOR_TORCH_XLA.problem({})
    assert found is not None
    assert f"libtpu {version} does not fit torch_xla 2.9.0, which was built with libtpu 0.0.21:" in found
    assert FOR_TORCH_XLA.fix == "Install it: pip install './packages/runtime-pjrt[tpu]'"
    assert FOR_TORCH_XLA.problem({"TPU_LIBRARY_PATH": "other.so"}) is None


@pytest.mark.parametrize(("version", "fits"), [("0.0.49", False), ("0.0.50", True), ("0.1.0", True)])
def test_torch_tpu_needs_a_newer_libtpu(install_plugin: PluginInstaller, version: str, fits: bool) -> None:
    install_plugin.metadata("libtpu", version=version)
    install_plugin.metadata("torch_tpu", version="0.2.0")
    assert (FOR_TORCH_TPU.problem({}) is None) == fits


def test_a_libtpu_without_metadata_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    assert FOR_TORCH_XLA.problem({}) is None


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
