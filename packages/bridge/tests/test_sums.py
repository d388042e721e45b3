"""Sums of narrow numbers are rounded once, as PyTorch rounds them; some sums are the C library's."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla_bridge.engine.engine import Engine
from polyxla_bridge.engine.expansions import inlining, sums
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.executable import ArrayType

Computed = Callable[[bytes, list[np.ndarray[Any, Any]]], list[np.ndarray[Any, Any]]]

TIMEOUT_S = 60


REDUCE = "reduce(x, z), dimensions={1}"
WINDOWS = "reduce-window(x, z), window={size=1x100 stride=1x40 pad=0_0x30_50}"
SCATTER = """scatter(d, i, u), update_window_dims={1}, inserted_window_dims={0},
    scatter_dims_to_operand_dims={0}, index_vector_dim=1"""


def program(dtype: str, result: str, instruction: str, step: str = "add") -> bytes:
    """Return a program that combines numbers of an array [4, 300]."""
    text = f"""HloModule sums
    step {{ a = T[] parameter(0) b = T[] parameter(1) ROOT c = T[] {step}(a, b) }}
    ENTRY main {{ x = T[4,300] parameter(0) z = T[] constant(0) d = T[3,4] broadcast(z), dimensions={{}}
      u = T[300,4] transpose(x), dimensions={{1,0}}
      j = s32[300] iota(), iota_dimension=0 t = s32[] constant(3)
      k = s32[300] broadcast(t), dimensions={{}} i = s32[300] remainder(j, k)
      ROOT r = T[{result}] {instruction}, to_apply=step }}"""
    data: bytes = hlo_module_from_text(text.replace("T[", f"{dtype}[")).as_serialized_hlo_module_proto()
    return data


def over_windows(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    padded = np.pad(numbers, ((0, 0), (30, 50)))
    return np.stack([padded[:, first : first + 100].sum(1) for first in range(0, 281, 40)], axis=1)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("result", "instruction", "exact"),
    [
        pytest.param("4", REDUCE, lambda x: x.sum(1), id="reduce"),
        pytest.param("4,8", WINDOWS, over_windows, id="windows"),
        pytest.param("3,4", SCATTER, lambda x: x.T.reshape(100, 3, 4).sum(0), id="scatter"),
    ],
)
def test_a_sum_is_rounded_once(
    name: str,
    result: str,
    instruction: str,
    exact: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]],
    computed: Computed,
) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)
    # float32 holds their sums without rounding.
    numbers = np.random.default_rng(0).integers(0, 200, (4, 300))
    data = program({"bfloat16": "bf16", "float16": "f16"}[name], result, instruction)
    (found,) = computed(in_library(data), [numbers.astype(dtype)])
    expected = exact(numbers).astype(dtype)
    assert found.tolist() == expected.tolist()
    (of_xla,) = computed(data, [numbers.astype(dtype)])
    assert of_xla.tolist() != expected.tolist()


@pytest.mark.parametrize("compile_on", ["jaxlib", "plugin"])
def test_both_engines_round_a_sum_once(compile_on: str, open_on_plugin: Callable[..., Engine]) -> None:
    engine = JaxEngine(BridgeSettings()) if compile_on == "jaxlib" else open_on_plugin(1)
    numbers = np.random.default_rng(0).integers(0, 200, (4, 300))
    options = xla_client.CompileOptions().SerializeAsString()
    executable = engine.compile(program("bf16", "3,4", SCATTER), options)
    given = numbers.astype(ml_dtypes.bfloat16).view(np.uint8)
    argument = engine.from_host(
        engine.devices[0], ArrayType("bfloat16", (4, 300)), memoryview(given.data).cast("B")
    )
    (result,) = engine.execute(executable, engine.devices[0], [argument])
    found = np.frombuffer(engine.to_host(result).result(TIMEOUT_S), np.uint8).view(ml_dtypes.bfloat16)
    expected = numbers.T.reshape(100, 3, 4).sum(0).astype(ml_dtypes.bfloat16)
    assert found.tolist() == expected.ravel().tolist()
    if compile_on == "jaxlib":
        engine.close()


@pytest.mark.parametrize(("dtype", "step"), [("f32", "add"), ("bf16", "maximum")])
@pytest.mark.parametrize(("result", "instruction"), [("4", REDUCE), ("4,8", WINDOWS), ("3,4", SCATTER)])
def test_other_reductions_stay_as_they_are(dtype: str, step: str, result: str, instruction: str) -> None:
    data = program(dtype, result, instruction, step)
    assert in_library(data) is data


def columns(dims: str, dimensions: str, result: str, dtype: str = "f32", initial: str = "0.5") -> bytes:
    text = f"""HloModule columns
    step {{ a = {dtype}[] parameter(0) b = {dtype}[] parameter(1) ROOT c = {dtype}[] add(a, b) }}
    ENTRY main {{ x = {dtype}[{dims}] parameter(0) z = {dtype}[] constant({initial})
      ROOT r = {dtype}[{result}] reduce(x, z), dimensions={{{dimensions}}}, to_apply=step }}"""
    data: bytes = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return data


def in_library(data: bytes) -> bytes:
    return inlining.replace(data, partial(sums.choose, calls_library=True))


def assert_sums(computed: Computed, program: bytes, dims: str, dimensions: str, dtype: str) -> None:
    """Assert that a program adds random numbers to 0.5 as numpy does in double precision."""
    shape = [int(size) for size in dims.split(",")]
    kind = np.dtype(np.float32 if dtype == "f32" else ml_dtypes.bfloat16)
    numbers = np.random.default_rng(0).normal(size=shape).astype(kind)
    over = tuple(int(dimension) for dimension in dimensions.split(","))
    exact = numbers.astype(np.float64).sum(axis=over) + 0.5
    (found,) = computed(program, [numbers])
    assert found.shape == exact.shape
    rounding = 2**-8 if dtype == "bf16" else 1e-6
    np.testing.assert_allclose(
        found.astype(np.float64), exact, rtol=rounding, atol=1e-6 * math.prod(shape) ** 0.5
    )


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("dims", "dimensions", "result"),
    [("7,16", "0", "16"), ("100,300", "0", "300"), ("4,50,3,20", "0,1", "3,20"), ("64,64,520", "1,0", "520")],
)
def test_the_library_adds_columns(
    monkeypatch: pytest.MonkeyPatch, dims: str, dimensions: str, result: str, dtype: str, computed: Computed
) -> None:
    monkeypatch.setattr(sums, "LEAST_SIZE", 0)
    replaced = in_library(columns(dims, dimensions, result, dtype))
    assert hlo.called_targets(replaced) == {sums.TARGET}
    assert_sums(computed, replaced, dims, dimensions, dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("dims", "dimensions", "result"),
    [("128,10,24,24", "0,2,3", "10"), ("3,7,5,1500", "0,3", "7,5"), ("600,1,19", "2,0", "1")],
)
def test_the_library_adds_features(
    dims: str, dimensions: str, result: str, dtype: str, computed: Computed
) -> None:
    replaced = in_library(columns(dims, dimensions, result, dtype))
    assert hlo.called_targets(replaced) == {sums.FEATURES_TARGET}
    assert_sums(computed, replaced, dims, dimensions, dtype)


def test_a_long_sum_of_columns_is_exact(computed: Computed) -> None:
    """As exact as XLA's, which adds parts of a column first."""
    data = columns("100000,16", "0", "16", initial="0")
    replaced = in_library(data)
    assert hlo.called_targets(replaced) == {sums.TARGET}
    numbers = np.random.default_rng(0).uniform(0, 1, (100000, 16)).astype(np.float32)
    exact = numbers.astype(np.float64).sum(axis=0)
    (mine, xla) = (np.abs(computed(each, [numbers])[0] - exact).max() for each in (replaced, data))
    assert mine <= xla


@pytest.mark.parametrize(
    ("dims", "dimensions", "result"),
    [
        ("1000,1000", "1", "1000"),
        ("100,100,100", "1,2", "100"),
        ("1000000,8", "0", "8"),
        ("100,100", "0", "100"),
        ("600,600", "0,1", ""),
        # Too small, with too few adjacent numbers, and with two ranges of features.
        ("8,4,8", "0,2", "4"),
        ("1000,50,4", "0,2", "50"),
        ("30,40,50,60", "0,2", "40,60"),
    ],
)
def test_sums_that_xla_computes_as_fast_stay(dims: str, dimensions: str, result: str) -> None:
    data = columns(dims, dimensions, result)
    assert in_library(data) is data


def test_without_the_library_xla_adds_columns() -> None:
    data = columns("1000,1000", "0", "1000")
    assert inlining.replace(data, partial(sums.choose, calls_library=False)) is data
