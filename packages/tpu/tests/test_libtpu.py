"""The releases of libtpu that work with a framework."""

from __future__ import annotations

import pytest

from polyxla_testing import PluginInstaller
from polyxla_tpu.libtpu import FOR_TORCH_TPU, FOR_TORCH_XLA


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
