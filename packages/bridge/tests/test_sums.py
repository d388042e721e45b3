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

from polyxla_bridge.engine.expansions import inlining, sums
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.executable import ArrayType

Computed = Callable[[bytes, list[np.ndarray[Any, Any]]], list[np.ndarray[Any, Any]]]

TIMEOUT_S = 60


def program(dtype: str, step: str) -> bytes:
    text = f"""HloModule reduces
    step {{ a = {dtype}[] parameter(0) b = {dtype}[] parameter(1) ROOT c = {dtype}[] {step}(a, b) }}
    ENTRY main {{ x = {dtype}[4,300] parameter(0) z = {dtype}[] constant(0)
      ROOT r = {dtype}[4] reduce(x, z), dimensions={{1}}, to_apply=step }}"""
    data: bytes = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return data


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_sum_is_rounded_once(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)
    numbers = np.random.default_rng(0).uniform(0, 30, (4, 300)).astype(dtype)
    engine = JaxEngine(BridgeSettings())
    options = xla_client.CompileOptions().SerializeAsString()
    executable = engine.compile(program({"bfloat16": "bf16", "float16": "f16"}[name], "add"), options)
    argument = engine.from_host(
        engine.devices[0], ArrayType(name, (4, 300)), memoryview(numbers.view(np.uint8).data).cast("B")
    )
    (result,) = engine.execute(executable, engine.devices[0], [argument])
    found = np.frombuffer(engine.to_host(result).result(TIMEOUT_S), np.uint8).view(dtype)
    engine.close()
    assert found.tolist() == numbers.astype(np.float32).sum(axis=1).astype(dtype).tolist()


@pytest.mark.parametrize(("dtype", "step"), [("f32", "add"), ("bf16", "maximum")])
def test_other_reductions_stay_as_they_are(dtype: str, step: str) -> None:
    data = program(dtype, step)
    assert inlining.replace(data, partial(sums.choose, calls_library=True)) is data


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
    numbers = np.random.default_rng(0).uniform(0, 1, (100000, 16)).astype(np.float32)
    exact = numbers.astype(np.float64).sum(axis=0)
    (mine, xla) = (np.abs(computed(each, [numbers])[0] - exact).max() for each in (in_library(data), data))
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
