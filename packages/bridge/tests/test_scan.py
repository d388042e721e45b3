"""Scans without XLA's instruction, compared with numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla_bridge.engine.expansions import inlining, scan
from polyxla_bridge.errors import PjrtError

Computed = Callable[[bytes, list[np.ndarray[Any, Any]]], list[np.ndarray[Any, Any]]]

ADD = "c = f32[3] add(a, b)"
# A carry that is not the result: the sum before each element.
EXCLUSIVE = "c = f32[3] add(a, b) ROOT t = (f32[3], f32[3]) tuple(b, c)"


def program(step: str, options: str) -> bytes:
    if "ROOT" not in step:
        step += " ROOT t = (f32[3], f32[3]) tuple(c, c)"
    text = f"""HloModule scans
    step {{ a = f32[3] parameter(0) b = f32[3] parameter(1) {step} }}
    ENTRY main {{ x = f32[5,3] parameter(0) i = f32[3] parameter(1)
      ROOT r = (f32[5,3], f32[3]) scan(x, i), dimensions={{0}}, num_carries=1, {options} to_apply=step }}"""
    data: bytes = hlo_module_from_text(text.replace(", ", ",")).as_serialized_hlo_module_proto()
    return data


def totals(x: np.ndarray[Any, Any], i: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    whole: np.ndarray[Any, Any] = np.cumsum(x, 0) + i
    return whole


@pytest.mark.parametrize(
    ("step", "options", "results", "carry"),
    [
        pytest.param(ADD, "is_associative=true,", totals, lambda x, i: x.sum(0) + i, id="parallel"),
        pytest.param(ADD, "", totals, lambda x, i: x.sum(0) + i, id="in-order"),
        pytest.param(
            ADD,
            "is_associative=true, is_reverse=true,",
            lambda x, i: totals(x[::-1], i)[::-1],
            lambda x, i: x.sum(0) + i,
            id="reverse",
        ),
        pytest.param(
            EXCLUSIVE,
            "is_associative=true,",
            lambda x, i: totals(x, i) - x,
            lambda x, i: x.sum(0) + i,
            id="exclusive",
        ),
        pytest.param(
            "c = f32[3] maximum(a, b)",
            "is_associative=true,",
            lambda x, i: np.maximum(np.maximum.accumulate(x, 0), i),
            lambda x, i: np.maximum(x.max(0), i),
            id="maximum",
        ),
    ],
)
def test_a_scan_is_computed(
    step: str, options: str, results: Callable[..., Any], carry: Callable[..., Any], computed: Computed
) -> None:
    expanded = inlining.replace(program(step, options), scan.choose)
    numbers = np.random.default_rng(0)
    x, initial = (numbers.integers(-9, 9, shape).astype(np.float32) for shape in ((5, 3), 3))
    found = computed(expanded, [x, initial])
    np.testing.assert_array_equal(found[0], results(x, initial))
    np.testing.assert_array_equal(found[1], carry(x, initial))


def test_a_step_of_unknown_operations_is_refused() -> None:
    with pytest.raises(PjrtError, match=r"a scan with the operation cosine is not supported .* \.cpu\(\)"):
        inlining.replace(program("c = f32[3] cosine(b)", ""), scan.choose)


def test_a_program_without_a_scan_is_left_alone() -> None:
    text = "HloModule none ENTRY main { ROOT x = f32[5] parameter(0) }"
    data = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    assert inlining.replace(data, scan.choose) is data
