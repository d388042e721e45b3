"""Products of matrices by torch's library, compared with NumPy's in double precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla_bridge.engine.expansions import arithmetic, inlining
from polyxla_bridge.programs import hlo

Computed = Callable[[bytes, list[np.ndarray[Any, Any]]], list[np.ndarray[Any, Any]]]

DIRECT = """HloModule products
ENTRY main { x = f32[INNER,ROWS] parameter(0) y = f32[INNER,COLUMNS] parameter(1)
  ROOT d = f32[ROWS,COLUMNS] dot(x, y), lhs_contracting_dims={0}, rhs_contracting_dims={0} }"""
TRANSPOSED = """HloModule products
ENTRY main { x = f32[INNER,ROWS] parameter(0) y = f32[INNER,COLUMNS] parameter(1)
  t = f32[ROWS,INNER] transpose(x), dimensions={1,0}
  ROOT d = f32[ROWS,COLUMNS] dot(t, y), lhs_contracting_dims={1}, rhs_contracting_dims={0} }"""
SEVERAL = """HloModule products
ENTRY main { x = f32[2,INNER,ROWS] parameter(0) y = f32[2,INNER,3,COLUMNS] parameter(1)
  ROOT d = f32[ROWS,3,COLUMNS] dot(x, y), lhs_contracting_dims={0,1}, rhs_contracting_dims={0,1} }"""
EQUATIONS = {DIRECT: "kr,kc->rc", TRANSPOSED: "kr,kc->rc", SEVERAL: "akr,akbc->rbc"}


def program(text: str, inner: int, rows: int, columns: int) -> bytes:
    for name, size in (("INNER", inner), ("ROWS", rows), ("COLUMNS", columns)):
        text = text.replace(name, str(size))
    data: bytes = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return data


@pytest.mark.parametrize(
    ("text", "inner", "rows", "columns"),
    [
        (DIRECT, 3, 2, 5),
        (DIRECT, 4096, 128, 96),
        # Fewer rows than threads.
        (DIRECT, 70000, 1, 300),
        (TRANSPOSED, 2000, 130, 101),
        (SEVERAL, 50, 7, 4),
    ],
)
def test_the_library_computes_the_product(
    monkeypatch: pytest.MonkeyPatch, text: str, inner: int, rows: int, columns: int, computed: Computed
) -> None:
    monkeypatch.setattr(arithmetic, "LEAST_WORK", 0)
    data = program(text, inner, rows, columns)
    replaced = inlining.replace(data, arithmetic.choose_product)
    assert hlo.called_targets(replaced) == {arithmetic.TARGET}
    numbers = np.random.default_rng(0)
    arguments = [numbers.normal(size=dims).astype(np.float32) for _, dims in hlo.parameters(data)]
    exact = np.einsum(EQUATIONS[text], *(array.astype(np.float64) for array in arguments))
    (found,) = computed(replaced, arguments)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5 * float(np.abs(exact).max()))
    # Equal to the bit in every run.
    np.testing.assert_array_equal(computed(replaced, arguments)[0], found)


@pytest.mark.parametrize(
    "text",
    [
        # Small.
        program(DIRECT, 100, 100, 100),
        # The left matrix needs no transposition.
        """HloModule products
        ENTRY main { x = f32[512,512] parameter(0) y = f32[512,512] parameter(1)
          ROOT d = f32[512,512] dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0} }""",
        """HloModule products
        ENTRY main { x = f32[8,512,512] parameter(0) y = f32[8,512,512] parameter(1)
          ROOT d = f32[8,512,512] dot(x, y), lhs_batch_dims={0}, rhs_batch_dims={0},
            lhs_contracting_dims={1}, rhs_contracting_dims={1} }""",
        """HloModule products
        ENTRY main { x = f64[512,512] parameter(0) y = f64[512,512] parameter(1)
          ROOT d = f64[512,512] dot(x, y), lhs_contracting_dims={0}, rhs_contracting_dims={0} }""",
        """HloModule products
        ENTRY main { x = f32[64,64,512] parameter(0) y = f32[64,64,512] parameter(1)
          ROOT d = f32[512,512] dot(x, y), lhs_contracting_dims={0,1}, rhs_contracting_dims={1,0} }""",
    ],
)
def test_other_products_are_left_to_xla(text: str | bytes) -> None:
    data = text if isinstance(text, bytes) else hlo_module_from_text(text).as_serialized_hlo_module_proto()
    assert inlining.replace(data, arithmetic.choose_product) is data


def test_a_large_product_is_torchs() -> None:
    data = program(TRANSPOSED, 8192, 128, 512)
    assert hlo.called_targets(inlining.replace(data, arithmetic.choose_product)) == {arithmetic.TARGET}
