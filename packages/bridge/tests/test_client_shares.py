"""`PjrtEngine` on the first devices of a client that stays open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polyxla_bridge.engine.pjrt_engine import PjrtEngine
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.plugin_client import plugin
from polyxla_bridge.plugin_client.client import PluginClient
from polyxla_bridge.programs.executable import ArrayType
from polyxla_testing.engine_conformance import EngineConformance, OpenEngine


@pytest.fixture(scope="module")
def kept(cpu_plugin: Path) -> PluginClient:
    return PluginClient(plugin.load(cpu_plugin), {"cpu_device_count": 8})


@pytest.fixture
def open_engine(kept: PluginClient) -> Iterator[OpenEngine]:
    engines: list[PjrtEngine] = []

    def open_engine(count: int) -> PjrtEngine:
        engines.append(PjrtEngine(BridgeSettings(), kept.share(count)))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()
        assert engine.live_buffers == 0


class TestConformance(EngineConformance):
    """Every engine passes these tests, and leaves nothing behind in the client, which the next one uses."""


def test_read_only_memory_is_copied_before_it_is_freed(open_engine: OpenEngine) -> None:
    engine = open_engine(1)
    size = 1 << 20
    pieces = [bytes([number]) * size for number in range(1, 9)]
    type_ = ArrayType("uint8", (size,))
    arrays = [engine.from_host(engine.devices[0], type_, memoryview(piece)) for piece in pieces]
    assert [bytes(engine.to_host(array).result(60)) for array in arrays] == pieces
