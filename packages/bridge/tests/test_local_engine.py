"""What the engines on devices of this process share: the order of executions, and the memory of arrays."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyxla_bridge.engine import memory_accounting
from polyxla_bridge.engine.engine import Buffer
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.engine.local_engine import LocalEngine
from polyxla_bridge.engine.memory_accounting import MemoryAccount
from polyxla_bridge.engine.pjrt_engine import PjrtEngine
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.executable import Executable
from polyxla_testing.engine_conformance import (
    ADD,
    BYTES,
    adding,
    compiled,
    download,
    large,
    module,
    ones,
    options_for,
    upload,
)

# Less than the tests' own limit: replicas that meet in different orders wait for ever.
TIMEOUT_S = 60
Open = Callable[..., LocalEngine]
SUMMING = f"""HloModule summing, replica_count=2
    {ADD}
    ENTRY main {{ x = f32[4] parameter(0)
      ROOT r = f32[4] all-reduce(x), replica_groups={{}}, to_apply=add }}"""
PARTS = f"""HloModule parts
    {ADD}
    ENTRY main {{ x = f32[8] parameter(0), sharding={{devices=[2]0,1}} z = f32[] constant(0)
      ROOT s = f32[] reduce(x, z), dimensions={{0}}, to_apply=add, sharding={{replicated}} }}"""


@pytest.fixture(params=["jaxlib", "plugin"])
def open_engine(
    request: pytest.FixtureRequest, free_port: Callable[[], int], cpu_plugin: Path
) -> Iterator[Open]:
    with ExitStack() as stack:

        def open_engine(count: int, **settings: Any) -> LocalEngine:
            if request.param == "plugin":
                options = {"cpu_device_count": count}
                engine: LocalEngine = PjrtEngine(BridgeSettings(**settings), cpu_plugin, options)
            else:
                address = f"127.0.0.1:{free_port()}"
                engine = JaxEngine(BridgeSettings(count, coordinator=address, **settings))
            # An engine whose programs wait for ever does not finish.
            stack.callback(engine.close, 5)
            return engine

        yield open_engine


def value(engine: LocalEngine, buffer: Buffer) -> float:
    return float(np.frombuffer(engine.to_host(buffer).result(TIMEOUT_S), np.float32)[0])


def wait_in_first_put(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, *, is_queued: bool
) -> tuple[threading.Event, ...]:
    """Let the thread "first" wait before its first task is queued, or after it is.

    Returns:
        What is set when it waits, and what ends the wait; it ends after half a second anyway.
    """
    waits, goes_on = threading.Event(), threading.Event()

    class Tasks:
        def __init__(self, tasks: Any) -> None:
            self.get, self._put = tasks.get, tasks.put

        def put(self, task: Any) -> None:
            if is_queued:
                self._put(task)
            if threading.current_thread().name == "first" and not waits.is_set():
                waits.set()
                goes_on.wait(0.5)
            if not is_queued:
                self._put(task)

    for thread in engine._threads.values():
        monkeypatch.setattr(thread, "_tasks", Tasks(thread._tasks))
    return waits, goes_on


def test_two_threads_of_one_device_meet_the_others_in_the_order_of_its_queue(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(2)
    summing = compiled(engine, SUMMING)
    inputs = [upload(engine, ones(1), index) for index in (0, 0, 1, 1)]
    results: list[Buffer] = []

    def execute(argument: Buffer) -> None:
        results.extend(engine.execute(summing, argument.device, [argument]))

    waits, goes_on = wait_in_first_put(engine, monkeypatch, is_queued=False)
    first = threading.Thread(target=execute, args=(inputs[0],), name="first")
    first.start()
    assert waits.wait(TIMEOUT_S)
    execute(inputs[1])
    goes_on.set()
    first.join(TIMEOUT_S)
    for argument in inputs[2:]:
        execute(argument)
    assert [value(engine, result) for result in results] == [2] * 4


class Finalised:
    """Garbage that calls a function when it is collected."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call, self.itself = call, self

    def __del__(self) -> None:
        self.call()


def test_a_finaliser_executes_before_or_after_a_partitioned_program_on_all_devices(open_engine: Open) -> None:
    engine = open_engine(2)
    summing, finding = (
        engine.compile(module(text), options_for([0, 1], partitions=2))
        for text in (PARTS, PARTS.replace("parts", "most").replace("s = f32[] add", "s = f32[] maximum"))
    )
    given = [[upload(engine, ones(1), index)] for index in range(2)]
    results: list[tuple[Executable, Buffer]] = []

    def execute(program: Executable) -> None:
        results.extend((program, result) for (result,) in engine.execute_partitioned(program, given))

    # What exists now is not garbage, and would make each collection slow.
    gc.freeze()
    thresholds, count = gc.get_threshold(), 150
    try:
        # The collection comes at each of the places where it may.
        for allocations in range(1, count + 1):
            Finalised(functools.partial(execute, finding))
            gc.set_threshold(allocations)
            execute(summing)
            gc.set_threshold(0)
            gc.collect()
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
    for program in (summing, finding):
        found = [value(engine, result) for executed, result in results if executed is program]
        assert found == [8 if program is summing else 1] * 2 * count


def test_a_partitioned_program_is_queued_on_all_devices_before_the_next_program(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(2)
    summing = compiled(engine, SUMMING)
    parts = engine.compile(module(PARTS), options_for([0, 1], partitions=2))
    rows, inputs = ([[upload(engine, ones(1), index)] for index in range(2)] for _ in range(2))
    results: list[list[Buffer]] = []
    waits, goes_on = wait_in_first_put(engine, monkeypatch, is_queued=True)
    first = threading.Thread(
        target=lambda: results.extend(engine.execute_partitioned(parts, rows)), name="first"
    )
    first.start()
    assert waits.wait(TIMEOUT_S)
    sums = [engine.execute(summing, device, inputs[device.index])[0] for device in engine.devices]
    goes_on.set()
    first.join(TIMEOUT_S)
    assert [value(engine, result) for result in sums] == [2, 2]
    assert [value(engine, result) for (result,) in results] == [8, 8]


def test_many_partitioned_programs_may_wait_for_their_turn(open_engine: Open) -> None:
    # On XLA's CPU client as a plugin, those in front once kept the threads that the first one needed.
    engine = open_engine(2)
    parts = engine.compile(module(PARTS), options_for([0, 1], partitions=2))
    given = [[upload(engine, ones(1), index)] for index in range(2)]
    results = [result for _ in range(300) for (result,) in engine.execute_partitioned(parts, given)]
    assert [value(engine, result) for result in results] == [8] * 600


def test_memory_of_a_program_is_reserved_until_its_results_are_counted(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(1, memory_bytes=4 * BYTES, is_memory_limited=True)
    monkeypatch.setattr(memory_accounting, "FREE_TIMEOUT_S", 0)
    add = MemoryAccount.add
    refused: list[str] = []

    def add_later(account: MemoryAccount, *arguments: Any, **options: Any) -> None:
        # What another thread would do at this moment.
        with pytest.raises(PjrtError) as error:
            account.reserve(4 * BYTES - account.stats()["bytes_in_use"], "another array")
        refused.append(error.value.message)
        add(account, *arguments, **options)

    program = adding(engine)
    monkeypatch.setattr(MemoryAccount, "add", add_later)
    x, y = large(engine, 1), large(engine, 2)
    total, _ = engine.execute(program, engine.devices[0], [x, y])
    assert download(engine, total)[0, 0] == 3
    assert len(refused) == 3, "the two arrays and the program"
