"""`JaxEngine` keeps the contract of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest

from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_testing.engine_conformance import (
    ADD,
    EngineConformance,
    MemoryLimitConformance,
    OpenEngine,
    OpenLimited,
    download,
    module,
    ones,
    options_for,
    upload,
)


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


def test_some_devices_meet_in_a_program_without_the_others(open_engine: OpenEngine) -> None:
    engine = open_engine(4)
    code = module(f"""HloModule some, replica_count=2
        {ADD}
        ENTRY main {{ x = f32[] parameter(0) i = u32[] replica-id() k = f32[] convert(i)
          s = f32[] all-reduce(x), replica_groups={{}}, to_apply=add ROOT r = f32[] add(s, k) }}""")
    compiled = engine.compile(code, options_for([3, 1]))
    assert (compiled.devices, compiled.groups()) == ((3, 1), frozenset({frozenset({1, 3})}))
    for some in (compiled, engine.deserialize(engine.serialize(compiled))):
        results = [
            engine.execute(some, engine.devices[index], [upload(engine, np.float32(index), index)])[0]
            for index in (1, 3)
        ]
        # In the program, device 3 has number 0.
        assert [float(download(engine, result)) for result in results] == [5, 4]


def test_some_devices_run_a_partitioned_program(open_engine: OpenEngine) -> None:
    engine = open_engine(4)
    code = module(f"""HloModule parts
        {ADD}
        ENTRY main {{ x = f32[8] parameter(0), sharding={{devices=[2]0,1}} z = f32[] constant(0)
          ROOT s = f32[] reduce(x, z), dimensions={{0}}, to_apply=add, sharding={{replicated}} }}""")
    parts = engine.compile(code, options_for([1, 2], partitions=2))
    rows = [[upload(engine, ones(index), index)] for index in (1, 2)]
    assert [float(download(engine, row[0])) for row in engine.execute_partitioned(parts, rows)] == [12, 12]


def test_devices_that_the_job_does_not_have_are_refused(open_engine: OpenEngine) -> None:
    engine = open_engine(2)
    code = module("HloModule none\nENTRY main { ROOT x = f32[] parameter(0) }")
    with pytest.raises(
        PjrtError, match=r"for the devices \[1, 2\] is not supported, only for devices of this"
    ):
        engine.compile(code, options_for([1, 2]))
