"""The engine that records programs, without torch_xla, with programs made by jax."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib import xla_client

from polyxla_bridge.abi import Code
from polyxla_bridge.engine.engine import Buffer
from polyxla_bridge.engine.recording_engine import LARGE_BYTES, RecordingEngine
from polyxla_bridge.env import POLYXLA_LIBTPU_PROGRAMS, BridgeSettings, from_environ
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.executable import ArrayType
from polyxla_bridge.programs.hlo import structure
from polyxla_testing.engine_conformance import options_for

TIMEOUT_S = 60
LARGE = LARGE_BYTES // 4 + 1
OPTIONS = xla_client.CompileOptions().SerializeAsString()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RecordingEngine]:
    engine = RecordingEngine(BridgeSettings(programs_path=str(tmp_path / "programs")))
    yield engine
    engine.close()


def program(function: Callable[..., Any], *examples: Any) -> bytes:
    module = jax.jit(function).lower(*examples).compiler_ir("hlo")
    assert module is not None
    data: bytes = module.as_serialized_hlo_module_proto()
    return data


def of_size(size: int) -> Any:
    return jax.ShapeDtypeStruct((size,), jnp.float32)  # type: ignore[no-untyped-call]


def put(engine: RecordingEngine, array: np.ndarray[Any, Any]) -> Buffer:
    type_ = ArrayType(array.dtype.name, array.shape)
    return engine.from_host(engine.devices[0], type_, memoryview(array.reshape(-1).view(np.uint8).data))


def value(engine: RecordingEngine, buffer: Buffer) -> np.ndarray[Any, Any]:
    return np.frombuffer(engine.to_host(buffer).result(TIMEOUT_S), buffer.type.dtype)


def doubled(engine: RecordingEngine, size: int) -> np.ndarray[Any, Any]:
    shape = of_size(size)
    executable = engine.compile(program(lambda x: x + x, shape), OPTIONS)
    (result,) = engine.execute(executable, engine.devices[0], [put(engine, np.ones(size, np.float32))])
    return value(engine, result)


def logged(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "programs" / "0.log").read_text().splitlines()]


def test_small_programs_are_computed(engine: RecordingEngine) -> None:
    assert doubled(engine, 4).tolist() == [2] * 4
    assert engine.compiles == 1


def test_results_of_large_programs_are_zeros_and_nothing_is_compiled(engine: RecordingEngine) -> None:
    found = doubled(engine, LARGE)
    assert found.shape == (LARGE,)
    assert not found.any()
    assert engine.compiles == 0


@pytest.mark.parametrize("size", [4, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(("devices", "found"), [([1], (1,)), ([0, 1], ()), ([1, 0], (1, 0))], ids=str)
def test_a_program_has_its_devices(
    size: int, devices: list[int], found: tuple[int, ...], tmp_path: Path, free_port: Callable[[], int]
) -> None:
    address = f"127.0.0.1:{free_port()}"
    settings = BridgeSettings(2, coordinator=address, programs_path=str(tmp_path / "programs"))
    with closing(RecordingEngine(settings)) as engine:
        executable = engine.compile(program(lambda x: x + x, of_size(size)), options_for(devices))
        assert (executable.devices, executable.num_replicas) == (found, len(devices))


def test_a_small_program_computes_with_the_zeros_of_a_large_one(engine: RecordingEngine) -> None:
    array = of_size(LARGE)
    large = engine.compile(program(lambda x: x[:3] + (x + x)[:3], array), OPTIONS)
    (zeros,) = engine.execute(large, engine.devices[0], [put(engine, np.ones(LARGE, np.float32))])
    small = engine.compile(program(lambda x: x + 1, of_size(3)), OPTIONS)
    (result,) = engine.execute(small, engine.devices[0], [zeros])
    assert value(engine, result).tolist() == [1, 1, 1]


def test_each_program_is_recorded_with_its_options_its_stack_and_its_executions(
    engine: RecordingEngine, tmp_path: Path
) -> None:
    doubled(engine, 4)
    directory = tmp_path / "programs"
    (hlo,) = directory.glob("*.hlo")
    same = program(lambda x: x + x, of_size(4))
    assert structure(hlo.read_bytes()) == structure(same)
    assert hlo.with_suffix(".options").read_bytes() == OPTIONS
    compiled, executed = (json.loads(line) for line in (directory / "0.log").read_text().splitlines())
    assert compiled["compiled"] == hlo.stem
    line = next(line for file, line in compiled["stack"] if file == __file__)
    assert "engine.compile(" in Path(__file__).read_text().splitlines()[line - 1]
    arrays = [["float32", [4], 1]]
    assert executed == {"executed": hlo.stem, "device": 0, "in_use": 16, "arrays": arrays}


def test_the_main_threads_calls_are_recorded_when_another_thread_compiles(
    engine: RecordingEngine, tmp_path: Path
) -> None:
    code = program(lambda x: x + x, of_size(4))
    thread = threading.Thread(target=engine.compile, args=(code, OPTIONS))
    thread.start()
    thread.join(TIMEOUT_S)
    (line,) = logged(tmp_path)
    assert __file__ not in dict(line["stack"])
    at = dict(line["main"])[__file__]
    # It starts the other thread, or waits for it already.
    assert "    thread." in Path(__file__).read_text().splitlines()[at - 1]


def test_the_arrays_are_listed_when_they_are_more_than_before(
    engine: RecordingEngine, tmp_path: Path
) -> None:
    (device,) = engine.devices
    executable = engine.compile(program(lambda x: x + x, of_size(4)), OPTIONS)
    kept = [put(engine, np.ones(4, np.float32))]
    for _ in range(2):
        (result,) = engine.execute(executable, device, [kept[0]])
        assert value(engine, result).tolist() == [2] * 4
        del result
    kept.append(put(engine, np.ones((2, 3), np.float32)))
    (result,) = engine.execute(executable, device, [kept[0]])
    value(engine, result)
    first, second, third = logged(tmp_path)[1:]
    assert (first["in_use"], first["arrays"]) == (16, [["float32", [4], 1]])
    assert (second["in_use"], "arrays" in second) == (16, False)
    assert third["in_use"] == 40
    assert sorted(third["arrays"]) == [["float32", [2, 3], 1], ["float32", [4], 1]]


def test_arrays_that_are_not_computed_count_with_their_size(engine: RecordingEngine, tmp_path: Path) -> None:
    (device,) = engine.devices
    size = 4 * LARGE
    one = put(engine, np.ones(LARGE, np.float32))
    assert engine.memory_stats(device)["bytes_in_use"] == size
    executable = engine.compile(program(lambda x: (x + x, x[:2]), of_size(LARGE)), OPTIONS)
    results = engine.execute(executable, device, [one])
    value(engine, results[0])
    assert engine.memory_stats(device)["bytes_in_use"] == 2 * size + 8
    del results
    engine.delete(one)
    assert engine.memory_stats(device)["bytes_in_use"] == 0
    _, executed = logged(tmp_path)
    assert (executed["in_use"], executed["arrays"]) == (size, [["float32", [LARGE], 1]])


def test_a_donated_array_that_is_not_computed_counts_once(engine: RecordingEngine) -> None:
    (device,) = engine.devices
    donating = jax.jit(lambda x: x + x, donate_argnums=0).lower(of_size(LARGE)).compiler_ir("hlo")
    assert donating is not None
    executable = engine.compile(donating.as_serialized_hlo_module_proto(), OPTIONS)
    engine.reset_memory_peak(device)
    (result,) = engine.execute(executable, device, [put(engine, np.ones(LARGE, np.float32))])
    value(engine, result)
    stats = engine.memory_stats(device)
    assert (stats["bytes_in_use"], stats["peak_bytes_in_use"]) == (4 * LARGE, 4 * LARGE)


def test_a_program_that_the_framework_has_kept_is_not_loaded(engine: RecordingEngine) -> None:
    executable = engine.compile(program(lambda x: x + x, of_size(4)), OPTIONS)
    with pytest.raises(PjrtError, match="no compiled program is loaded while programs are recorded"):
        engine.deserialize(engine.serialize(executable))


def test_a_program_that_is_not_compiled_cannot_be_serialised(engine: RecordingEngine) -> None:
    executable = engine.compile(program(lambda x: x + x, of_size(LARGE)), OPTIONS)
    with pytest.raises(PjrtError, match="is recorded, but not compiled: it cannot be serialised") as refused:
        engine.serialize(executable)
    assert refused.value.code == Code.UNIMPLEMENTED
    assert engine.temporary_bytes(executable) == 0


def test_the_variable_names_the_directory() -> None:
    assert from_environ({POLYXLA_LIBTPU_PROGRAMS: "/there"}).programs_path == "/there"
    assert not from_environ({}).programs_path
