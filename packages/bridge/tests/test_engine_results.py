"""The engine's memory accounting, donation, program files and activities."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla_bridge.engine import stall_watchdog
from polyxla_bridge.engine.compiler import COMPILER
from polyxla_bridge.engine.engine import Buffer
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.engine.memory_accounting import machine_bytes
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.executable import _MAGIC, ArrayType, Executable, unpack
from polyxla_testing.engine_conformance import SQUARING

TIMEOUT_S = 60
COUNT = 1 << 18
BYTES = 4 * COUNT


@pytest.fixture
def engine() -> Iterator[JaxEngine]:
    engine = JaxEngine(BridgeSettings())
    yield engine
    engine.close()


def compiled(engine: JaxEngine, text: str) -> Executable:
    module = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return engine.compile(module, xla_client.CompileOptions().SerializeAsString())


def upload(engine: JaxEngine, value: float, count: int = COUNT) -> Buffer:
    host = np.full(count, value, np.float32)
    return engine.from_host(engine.devices[0], ArrayType("float32", (count,)), host.view(np.uint8).data)


def first(engine: JaxEngine, buffer: Buffer) -> float:
    return float(np.frombuffer(engine.to_host(buffer).result(TIMEOUT_S), np.float32)[0])


def stats(engine: JaxEngine) -> dict[str, int]:
    return dict(engine.memory_stats(engine.devices[0]))


def adding(engine: JaxEngine, alias: str = "") -> Executable:
    """Return a program for x + y, which reuses the memory of x if there is an alias."""
    header = f", input_output_alias={{ {{0}}: (0, {{}}, {alias}) }}" if alias else ""
    return compiled(
        engine,
        f"""HloModule adding{header}
        ENTRY main {{ x = f32[{COUNT}] parameter(0) y = f32[{COUNT}] parameter(1)
          s = f32[{COUNT}] add(x, y) k = f32[] constant(1) ROOT t = (f32[{COUNT}], f32[]) tuple(s, k) }}""",
    )


@pytest.mark.parametrize("alias", ["may-alias", "must-alias"])
def test_a_donated_array_gives_its_memory_and_is_deleted(engine: JaxEngine, alias: str) -> None:
    add = adding(engine, alias)
    # A result: XLA gives up no memory that is the caller's, which an uploaded array may be.
    x, _ = engine.execute(adding(engine), engine.devices[0], [upload(engine, 0), upload(engine, 1)])
    y = upload(engine, 2)
    where = x.value.result(TIMEOUT_S).unsafe_buffer_pointer()
    total, _ = engine.execute(add, engine.devices[0], [x, y])
    assert x.is_deleted
    assert not y.is_deleted
    assert total.value.result(TIMEOUT_S).unsafe_buffer_pointer() == where
    assert first(engine, total) == 3
    assert first(engine, y) == 2
    with pytest.raises(PjrtError, match="was donated to a program"):
        first(engine, x)


def test_memory_is_counted_to_the_byte(engine: JaxEngine) -> None:
    limit = machine_bytes()
    assert stats(engine) == {
        "bytes_in_use": 0,
        "peak_bytes_in_use": 0,
        "num_allocs": 0,
        "largest_alloc_size": 0,
        "bytes_limit": limit,
    }
    x, y = upload(engine, 1), upload(engine, 2)
    total, one = engine.execute(adding(engine), engine.devices[0], [x, y])
    assert first(engine, total) == 3
    assert stats(engine)["bytes_in_use"] == 3 * BYTES + 4
    assert stats(engine)["largest_alloc_size"] == BYTES
    assert stats(engine)["num_allocs"] == 4
    for buffer in (x, y, total, one):
        engine.delete(buffer)
    assert engine.finish(TIMEOUT_S)
    assert stats(engine)["bytes_in_use"] == 0
    assert stats(engine)["peak_bytes_in_use"] == 3 * BYTES + 4
    engine.reset_memory_peak(engine.devices[0])
    assert stats(engine)["peak_bytes_in_use"] == 0


def test_a_donated_array_is_counted_once(engine: JaxEngine) -> None:
    add = adding(engine, "may-alias")
    x, y = upload(engine, 1), upload(engine, 2)
    for _ in range(50):
        x, one = engine.execute(add, engine.devices[0], [x, y])
        engine.delete(one)
    assert first(engine, x) == 101
    assert stats(engine)["bytes_in_use"] <= 2 * BYTES + 4
    assert stats(engine)["peak_bytes_in_use"] <= 2 * BYTES + 8


def test_temporary_arrays_count_while_a_program_runs(engine: JaxEngine) -> None:
    squaring = compiled(engine, SQUARING)
    zeros = np.zeros((512, 512), np.float32)
    x = engine.from_host(engine.devices[0], ArrayType("float32", zeros.shape), zeros.view(np.uint8).data)
    (result,) = engine.execute(squaring, engine.devices[0], [x])
    assert first(engine, result) == 0
    assert stats(engine)["bytes_in_use"] == 2 * BYTES
    assert 4 * BYTES <= stats(engine)["peak_bytes_in_use"] < 5 * BYTES


def test_memory_stays_flat_over_two_thousand_steps(engine: JaxEngine) -> None:
    add = adding(engine)
    x, y = upload(engine, 1), upload(engine, 2)
    used = []
    for step in range(2000):
        total, one = engine.execute(add, engine.devices[0], [x, y])
        engine.delete(x)
        engine.delete(one)
        x = total
        if step % 500 == 499:
            assert first(engine, x) == 1 + 2 * (step + 1)
            assert engine.finish(TIMEOUT_S)
            used.append(stats(engine)["bytes_in_use"])
    assert used == [used[0]] * 4
    assert used[0] <= 2 * BYTES + 4


def test_a_serialised_program_can_be_loaded_and_run(engine: JaxEngine) -> None:
    original = adding(engine, "may-alias")
    data = engine.serialize(original)
    other = JaxEngine(BridgeSettings())
    try:
        back = other.deserialize(data)
        assert back.outputs == original.outputs
        assert (back.name, back.fingerprint) == (original.name, original.fingerprint)
        assert back.optimized_hlo == original.optimized_hlo
        x, y = upload(other, 1), upload(other, 2)
        total, _ = other.execute(back, other.devices[0], [x, y])
        assert first(other, total) == 3
        assert x.is_deleted
        assert other.serialize(back) == data
        assert other.compiles == 0
    finally:
        other.close()


def test_invalid_bytes_are_refused_with_the_reason(engine: JaxEngine) -> None:
    data = engine.serialize(adding(engine))
    with pytest.raises(PjrtError, match="polyxla-bridge did not write these bytes"):
        engine.deserialize(b"something else")
    with pytest.raises(PjrtError, match="damaged"):
        engine.deserialize(data[:-100])
    middle = len(data) // 2
    with pytest.raises(PjrtError, match="damaged"):
        engine.deserialize(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    with pytest.raises(PjrtError, match="damaged"):
        engine.deserialize(_MAGIC)


def test_a_program_of_other_code_or_another_job_is_refused(
    engine: JaxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = adding(engine)
    with pytest.raises(PjrtError, match="adding was made for 1 devices, and this job has 2"):
        unpack(engine.serialize(executable), 2, COMPILER)
    monkeypatch.setattr("polyxla_bridge.programs.executable.code_digest", lambda: "0ld")
    old = engine.serialize(executable)
    monkeypatch.undo()
    with pytest.raises(PjrtError, match="adding was made with code 0ld, and this is code"):
        engine.deserialize(old)


SLOW = """HloModule slow
body { p = (s32[], f32[4096]) parameter(0) i = s32[] get-tuple-element(p), index=0
  x = f32[4096] get-tuple-element(p), index=1 one = s32[] constant(1) j = s32[] add(i, one)
  y = f32[4096] sine(x) ROOT t = (s32[], f32[4096]) tuple(j, y) }
condition { p = (s32[], f32[4096]) parameter(0) i = s32[] get-tuple-element(p), index=0
  end = s32[] constant(100000) ROOT less = pred[] compare(i, end), direction=LT }
ENTRY main { x = f32[4096] parameter(0) zero = s32[] constant(0) t = (s32[], f32[4096]) tuple(zero, x)
  w = (s32[], f32[4096]) while(t), condition=condition, body=body
  ROOT r = f32[4096] get-tuple-element(w), index=1 }"""


def test_activities_name_the_running_program(engine: JaxEngine) -> None:
    (activity,) = engine.activities()
    assert (activity.device, activity.program, activity.collectives) == (0, None, ())
    assert str(activity).startswith("replica 0: idle for ")
    (result,) = engine.execute(compiled(engine, SLOW), engine.devices[0], [upload(engine, 1, 4096)])
    deadline = time.monotonic() + TIMEOUT_S
    while (activity := engine.activities()[0]).program is None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert activity.program == "slow"
    text = stall_watchdog.describe(engine)
    assert "replica 0: in slow for " in text
    assert "test_activities_name_the_running_program" in text, "this thread's stack"
    result.value.result(TIMEOUT_S)
    assert engine.finish(TIMEOUT_S)
    assert engine.activities()[0].program is None


@pytest.mark.parametrize(("text", "expected"), [("1048576\n", 1 << 20), ("max\n", None), (None, None)])
def test_a_container_can_limit_memory(tmp_path: Path, text: str | None, expected: int | None) -> None:
    limit = tmp_path / "memory.max"
    if text is not None:
        limit.write_text(text)
    assert machine_bytes(limit) == (expected or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def test_a_closed_engine_leaves_no_threads() -> None:
    before = set(threading.enumerate())
    engine = JaxEngine(BridgeSettings())
    first(engine, upload(engine, 1))
    engine.close()
    assert set(threading.enumerate()) <= before
