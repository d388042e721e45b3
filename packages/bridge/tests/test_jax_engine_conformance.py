"""`JaxEngine` keeps the contract of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.engine_conformance import (
    EngineConformance,
    MemoryLimitConformance,
    OpenEngine,
    OpenLimited,
)
from polyxla_bridge.env import BridgeSettings


@pytest.fixture
def open_engine(free_port: Callable[[], int]) -> Iterator[OpenEngine]:
    with ExitStack() as stack:

        def open_engine(count: int) -> JaxEngine:
            settings = BridgeSettings(count, 1, 0, f"127.0.0.1:{free_port()}")
            return stack.enter_context(closing(JaxEngine(settings)))

        yield open_engine


@pytest.fixture
def open_limited() -> Iterator[OpenLimited]:
    with ExitStack() as stack:

        def open_limited(limit_bytes: int) -> JaxEngine:
            settings = BridgeSettings(memory_bytes=limit_bytes, is_memory_limited=True)
            return stack.enter_context(closing(JaxEngine(settings)))

        yield open_limited


class TestConformance(EngineConformance, MemoryLimitConformance):
    """Every engine passes these tests."""
