"""The engine that records programs, without torch_xla, with programs made by jax."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib import xla_client

from polyxla_bridge.engine.engine import Buffer
from polyxla_bridge.engine.recording_engine import LARGE_BYTES, RecordingEngine
from polyxla_bridge.env import POLYXLA_LIBTPU_PROGRAMS, BridgeSettings, from_environ
from polyxla_bridge.programs.executable import ArrayType
from polyxla_bridge.programs.hlo import structure

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


def test_small_programs_are_computed(engine: RecordingEngine) -> None:
    assert doubled(engine, 4).tolist() == [2] * 4
    assert engine.compiles == 1


def test_results_of_large_programs_are_zeros_and_nothing_is_compiled(engine: RecordingEngine) -> None:
    found = doubled(engine, LARGE)
    assert found.shape == (LARGE,)
    assert not found.any()
    assert engine.compiles == 0


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
    assert executed == {"executed": hlo.stem, "device": 0}


def test_the_variable_names_the_directory() -> None:
    assert from_environ({POLYXLA_LIBTPU_PROGRAMS: "/there"}).programs_path == "/there"
    assert not from_environ({}).programs_path
