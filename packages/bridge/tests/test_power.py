"""Powers whose exponent is an argument, compared with XLA's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jaxlib._hlo import HloModule, hlo_module_from_text  # type: ignore[import-not-found]

from polyxla_bridge.engine.expansions import arithmetic, inlining

Computed = Callable[[bytes, list[np.ndarray[Any, Any]]], list[np.ndarray[Any, Any]]]

DTYPES = {"f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
TOLERANCES = {"f32": 1e-6, "f64": 1e-14, "bf16": 1e-2, "f16": 1e-3}


def program(dtype: str, dims: str, exponent: str = "parameter(1)") -> bytes:
    text = f"""HloModule power
    ENTRY main {{ x = {dtype}[{dims}] parameter(0) y = {dtype}[] {exponent}
      ys = {dtype}[{dims}] broadcast(y), dimensions={{}} ROOT r = {dtype}[{dims}] power(x, ys) }}"""
    data: bytes = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return data


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [2, 3, -1, 0, 0.5, 2.5, np.inf, np.nan])
def test_a_power_is_xlas(dtype: str, exponent: float, computed: Computed) -> None:
    data = program(dtype, "3,5")
    expanded = inlining.replace(data, arithmetic.choose_power)
    assert " conditional(" in HloModule.from_serialized_hlo_module_proto(expanded).to_string()
    numbers = np.random.default_rng(0).standard_normal((3, 5))
    numbers[0] = 0, -0.0, np.inf, -np.inf, np.nan
    arguments = [np.asarray(each, DTYPES[dtype]) for each in (numbers, exponent)]
    with jax.enable_x64(True):
        ((expected,), (found,)) = (computed(code, arguments) for code in (data, expanded))
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found.astype(np.float64), expected.astype(np.float64), rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("exponent", [2, 3])
def test_squares_and_cubes_are_products(exponent: int, computed: Computed) -> None:
    x = np.random.default_rng(0).standard_normal((64,)).astype(np.float32)
    expanded = inlining.replace(program("f32", "64"), arithmetic.choose_power)
    (found,) = computed(expanded, [x, np.asarray(exponent, np.float32)])
    assert found.tobytes() == (x * x if exponent == 2 else x * x * x).tobytes()


def test_others_stay() -> None:
    for data in (program("f32", "4", "constant(3)"), program("s32", "4"), program("f32", "0,4")):
        assert inlining.replace(data, arithmetic.choose_power) is data


def test_a_power_in_a_loop_of_more_instructions_than_the_program_is_replaced_too(computed: Computed) -> None:
    """Ids are unique in a computation only: new ones had numbers of others in the loop."""
    state, lines = "(f32[4], s32[], f32[])", [f"x{n + 1} = f32[4] negate(x{n})" for n in range(60)]
    text = f"""HloModule loop
    body {{ state = {state} parameter(0) x0 = f32[4] get-tuple-element(state), index=0
      step = s32[] get-tuple-element(state), index=1 y = f32[] get-tuple-element(state), index=2
      {" ".join(lines)} ys = f32[4] broadcast(y), dimensions={{}} p = f32[4] power(x60, ys)
      one = s32[] constant(1) next = s32[] add(step, one) ROOT r = {state} tuple(p, next, y) }}
    condition {{ state = {state} parameter(0) step = s32[] get-tuple-element(state), index=1
      two = s32[] constant(2) ROOT less = pred[] compare(step, two), direction=LT }}
    ENTRY main {{ x = f32[4] parameter(0) y = f32[] parameter(1) zero = s32[] constant(0)
      begin = {state} tuple(x, zero, y) end = {state} while(begin), condition=condition, body=body
      ROOT r = f32[4] get-tuple-element(end), index=0 }}"""
    expanded = inlining.replace(
        hlo_module_from_text(text).as_serialized_hlo_module_proto(), arithmetic.choose_power
    )
    assert " conditional(" in HloModule.from_serialized_hlo_module_proto(expanded).to_string()
    x = np.array([1, 2, -3, 0.5], np.float32)
    (found,) = computed(expanded, [x, np.asarray(2, np.float32)])
    assert found.tolist() == (x**4).tolist()
