"""Products of float32 as a TPU computes them, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from polyxla_bridge.engine.engine import Engine
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.engine.pjrt_engine import PjrtEngine
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import numerics
from polyxla_testing.engine_conformance import compiled, download, module, upload

Array = np.ndarray[Any, Any]
DOT = """HloModule product
ENTRY main { x = f32[8,64] parameter(0) y = f32[64,8] parameter(1)
  ROOT r = f32[8,8] dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0} OPTIONS }"""
CONVOLUTION = """HloModule product
ENTRY main { x = f32[2,8,8,3] parameter(0) y = f32[3,3,3,4] parameter(1)
  ROOT r = f32[2,6,6,4] convolution(x, y), window={size=3x3}, dim_labels=b01f_01io->b01f OPTIONS }"""
SHAPES = {DOT: ((8, 64), (64, 8)), CONVOLUTION: ((2, 8, 8, 3), (3, 3, 3, 4))}


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    """One with a TPU's products, and one with products of float32."""
    opened = JaxEngine(BridgeSettings(has_tpu_numerics=True)), JaxEngine(BridgeSettings())
    yield opened
    for engine in opened:
        engine.close()


def computed(engine: Engine, text: str, *arguments: Array) -> Array:
    given = [upload(engine, argument) for argument in arguments]
    (result,) = engine.execute(compiled(engine, text), engine.devices[0], given)
    found: Array = download(engine, result)
    return found


def in_bfloat16(array: Array) -> Array:
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


def operands(text: str) -> list[Array]:
    numbers = np.random.default_rng(0)
    return [numbers.standard_normal(shape).astype(np.float32) for shape in SHAPES[text]]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (DOT, ""),
        (DOT, ", operand_precision={default,default}"),
        (DOT, ", algorithm=dot_bf16_bf16_f32"),
        (CONVOLUTION, ""),
    ],
)
def test_operands_are_rounded_to_bfloat16(engines: tuple[Engine, Engine], text: str, options: str) -> None:
    on_tpu, exact = engines
    x, y = operands(text)
    plain = text.replace("OPTIONS", "")
    found = computed(on_tpu, text.replace("OPTIONS", options), x, y)
    assert np.array_equal(found, computed(exact, plain, in_bfloat16(x), in_bfloat16(y)))
    assert not np.array_equal(found, computed(exact, plain, x, y))


@pytest.mark.parametrize("text", [DOT, CONVOLUTION], ids=["dot", "convolution"])
def test_a_high_precision_is_three_products(engines: tuple[Engine, Engine], text: str) -> None:
    on_tpu, exact = engines
    x, y = operands(text)
    high_x, high_y = in_bfloat16(x), in_bfloat16(y)
    low_x, low_y = in_bfloat16(x - high_x), in_bfloat16(y - high_y)
    plain = text.replace("OPTIONS", "")
    small = computed(exact, plain, high_x, low_y) + computed(exact, plain, low_x, high_y)
    found = computed(on_tpu, text.replace("OPTIONS", ", operand_precision={high,default}"), x, y)
    assert np.array_equal(found, small + computed(exact, plain, high_x, high_y))
    np.testing.assert_allclose(found, computed(exact, plain, x, y), rtol=1e-4, atol=1e-4)


def test_infinity_stays_infinity(engines: tuple[Engine, Engine]) -> None:
    x, y = operands(DOT)
    x[0, 0], y[0] = np.inf, 1
    for precision in ("default", "high"):
        found = computed(
            engines[0], DOT.replace("OPTIONS", f", operand_precision={{{precision},{precision}}}"), x, y
        )
        assert np.isposinf(found[0]).all()
        assert np.isfinite(found[1:]).all()


UNCHANGED: dict[str, Callable[[str], str]] = {
    "the highest precision": lambda text: text.replace("OPTIONS", ", operand_precision={default,highest}"),
    "an algorithm of float32": lambda text: text.replace("OPTIONS", ", algorithm=dot_f32_f32_f32"),
    "bfloat16": lambda text: text.replace("OPTIONS", "").replace("f32[", "bf16["),
    "float64": lambda text: text.replace("OPTIONS", "").replace("f32[", "f64["),
}


@pytest.mark.parametrize("what", UNCHANGED)
def test_other_products_stay(what: str) -> None:
    program = module(UNCHANGED[what](DOT))
    assert numerics.as_on_tpu(program) is program


@pytest.mark.parametrize("has", [True, False])
@pytest.mark.parametrize("kind", ["jaxlib", "plugin"])
def test_a_kept_program_is_loaded_only_where_products_are_the_same(
    kind: str, has: bool, request: pytest.FixtureRequest
) -> None:
    def opened(has_tpu_numerics: bool) -> Engine:
        settings = BridgeSettings(has_tpu_numerics=has_tpu_numerics)
        if kind == "jaxlib":
            return JaxEngine(settings)
        return PjrtEngine(settings, request.getfixturevalue("cpu_plugin"), {"cpu_device_count": 1})

    with closing(opened(has)) as engine:
        data = engine.serialize(compiled(engine, DOT.replace("OPTIONS", "")))
        assert engine.deserialize(data).name == "product"
    with closing(opened(not has)) as engine, pytest.raises(PjrtError, match="with a TPU's products"):
        engine.deserialize(data)
