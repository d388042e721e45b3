"""`JaxEngine` keeps the contract of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.engine_conformance import EngineConformance, OpenEngine
from polyxla_bridge.env import BridgeSettings


@pytest.fixture
def open_engine(free_port: Callable[[], int]) -> Iterator[OpenEngine]:
    with ExitStack() as stack:

        def open_engine(count: int) -> JaxEngine:
            settings = BridgeSettings(count, 1, 0, f"127.0.0.1:{free_port()}")
            return stack.enter_context(closing(JaxEngine(settings)))

        yield open_engine


class TestConformance(EngineConformance):
    """Every engine passes these tests."""
