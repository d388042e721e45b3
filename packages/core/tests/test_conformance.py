"""The fake runtime keeps every promise that polyxla_testing asks of a runtime."""

from __future__ import annotations

import pytest

from polyxla_testing import PluginInstaller, RuntimeConformance, RuntimeUnderTest


@pytest.fixture(params=[1, 4], ids=["1-replica", "4-replicas"])
def runtime(
    request: pytest.FixtureRequest, install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch
) -> RuntimeUnderTest:
    install_plugin.fake_runtime()
    monkeypatch.setenv("FAKE_DEVICES", str(request.param))
    return RuntimeUnderTest("fake")


class TestFakeRuntime(RuntimeConformance):
    pass
