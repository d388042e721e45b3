"""`PjrtEngine` on the GPUs of this machine: the plugin of `POLYXLA_PJRT_PLUGIN`, or else CUDA's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polyxla_bridge import env, pjrt_plugin
from polyxla_bridge.engine.pjrt_engine import PjrtEngine
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.plugin_client import plugin
from polyxla_bridge.plugin_client.client import PluginClient
from polyxla_testing.engine_conformance import EngineConformance, OpenEngine


@pytest.fixture(scope="module")
def client() -> Iterator[PluginClient]:
    """The client of the plugin; a test on a machine without GPUs is skipped."""
    settings = env.current()
    try:
        library = plugin.load(pjrt_plugin.library_path(settings.plugin or pjrt_plugin.CUDA))
        client = PluginClient(library, settings.plugin_options)
    except PjrtError as error:
        pytest.skip(error.message)
    yield client
    client.close()


@pytest.fixture
def open_engine(client: PluginClient) -> Iterator[OpenEngine]:
    engines: list[PjrtEngine] = []

    def open_engine(count: int) -> PjrtEngine:
        if count > len(client.devices):
            pytest.skip(f"the plugin has {len(client.devices)} devices")
        engines.append(PjrtEngine(BridgeSettings(), client.share(count)))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()
        assert engine.live_buffers == 0


class TestConformance(EngineConformance):
    """Every engine passes these tests."""
