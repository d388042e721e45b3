"""`PjrtEngine` on XLA's CPU client as a plugin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lammps_jax_pjrt_cpu
import pytest

from polyxla_bridge.engine.pjrt_engine import PjrtEngine
from polyxla_bridge.engine_conformance import EngineConformance, OpenEngine
from polyxla_bridge.env import BridgeSettings

PLUGIN = Path(lammps_jax_pjrt_cpu.PLUGIN_PATH)


def opened(count: int) -> PjrtEngine:
    return PjrtEngine(BridgeSettings(), PLUGIN, {"cpu_device_count": count})


@pytest.fixture
def open_engine() -> Iterator[OpenEngine]:
    engines: list[PjrtEngine] = []

    def open_engine(count: int) -> PjrtEngine:
        engines.append(opened(count))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()
        assert engine.live_buffers == 0


class TestConformance(EngineConformance):
    """Every engine passes these tests."""
