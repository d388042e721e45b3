"""Chains of cheap instructions with a user at each step, as in the gradient of an LSTM's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla_bridge.engine.engine import Engine
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.programs import fusion, hlo
from polyxla_testing.engine_conformance import OPTIONS

Computed = Callable[[bytes, list[np.ndarray[Any, Any]]], list[np.ndarray[Any, Any]]]


def chain(steps: int, shape: str = "f32[4,4]") -> bytes:
    """Return a program of steps x = x * a + b, each of which adds a product of tanh(x) to the result."""
    lines = [f"x0 = {shape} parameter(0)", f"a = {shape} parameter(1)", f"b = {shape} parameter(2)"]
    lines.append(f"r0 = {shape} copy(b)")
    product = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    for step in range(steps):
        following = step + 1
        lines += [
            f"m{following} = {shape} multiply(x{step}, a)",
            f"x{following} = {shape} add(m{following}, b)",
            f"h{following} = {shape} tanh(x{following})",
            f"d{following} = {shape} dot(h{following}, a), {product}",
            f"r{following} = {shape} add(r{step}, d{following})",
        ]
    lines.append(f"ROOT both = ({shape}, {shape}) tuple(r{steps}, x{steps})")
    text = "HloModule chain\nENTRY main {\n" + "\n".join(lines) + "\n}"
    data: bytes = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return data


@pytest.fixture(params=["jaxlib", "plugin"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Each of the two engines."""
    if request.param == "plugin":
        yield request.getfixturevalue("open_on_plugin")(1)
        return
    with closing(JaxEngine(BridgeSettings())) as engine:
        yield engine


def test_the_code_grows_with_the_number_of_steps_not_with_its_square(engine: Engine) -> None:
    code = [
        sum(1 for _ in hlo.instructions(engine.compile(chain(steps), OPTIONS).optimized_hlo))
        for steps in (40, 80)
    ]
    # XLA alone would make nearly four times as many.
    assert code[1] < 2.5 * code[0], code


def test_the_result_is_the_same(computed: Computed) -> None:
    data, numbers = chain(40), np.random.default_rng(0)
    arguments = [numbers.uniform(-0.9, 0.9, (4, 4)).astype(np.float32) for _ in range(3)]
    bounded = fusion.bounded(data)
    assert any(each.opcode == "call" for each in hlo.instructions(bounded))
    for found, expected in zip(computed(bounded, arguments), computed(data, arguments), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [0, 1, 30])
def test_a_short_chain_stays(steps: int) -> None:
    data = chain(steps)
    assert fusion.bounded(data) is data


def test_what_is_used_once_stays() -> None:
    lines = [f"x{step + 1} = f32[4] negate(x{step})" for step in range(20_000)]
    text = "HloModule line\nENTRY main {\nx0 = f32[4] parameter(0)\n" + "\n".join(lines)
    data = hlo_module_from_text(text + "\nROOT r = f32[4] abs(x20000)\n}").as_serialized_hlo_module_proto()
    assert fusion.bounded(data) is data


LONG = "\n".join(f"v{step + 1} = f32[] negate(v{step})" for step in range(70))
APPLIED = {
    "reduce": (
        f"""a = f32[] parameter(0) b = f32[] parameter(1) v0 = f32[] maximum(a, b) {LONG}
        size = f32[] abs(v70) ROOT most = f32[] maximum(size, v70)""",
        "ROOT r = f32[] reduce(x, zero), dimensions={0}, to_apply=applied",
    ),
    "sort": (
        f"""a = f32[] parameter(0) b = f32[] parameter(1) v0 = f32[] subtract(a, b) {LONG}
        size = f32[] abs(v70) none = f32[] constant(0) differ = pred[] compare(size, none), direction=GT
        less = pred[] compare(v70, none), direction=LT ROOT both = pred[] and(differ, less)""",
        "ROOT r = f32[100] sort(x), dimensions={0}, to_apply=applied",
    ),
}
"""What a program applies to each element, in which a chain of cheap instructions has two users; and how."""


@pytest.mark.parametrize("kind", APPLIED)
def test_what_is_applied_to_each_element_stays(kind: str, computed: Computed) -> None:
    applied, root = APPLIED[kind]
    text = f"""HloModule applying
applied {{ {applied} }}
ENTRY main {{ x = f32[100] parameter(0) zero = f32[] constant(0) {root} }}"""
    data = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    # With a call in it, XLA would end the process.
    bounded = fusion.bounded(data)
    assert bounded is data
    numbers = np.random.default_rng(0).normal(size=100).astype(np.float32)
    (found,) = computed(bounded, [numbers])
    np.testing.assert_array_equal(found, numbers.max() if kind == "reduce" else np.sort(numbers))


def test_the_body_of_a_loop_is_bounded(computed: Computed) -> None:
    steps = "\n".join(f"v{step + 1} = f32[4] negate(v{step})" for step in range(70))
    text = f"""HloModule loop
body {{ s = (s32[], f32[4]) parameter(0) i = s32[] get-tuple-element(s), index=0
v0 = f32[4] get-tuple-element(s), index=1 {steps}
size = f32[4] abs(v70) more = f32[4] add(size, v70)
one = s32[] constant(1) j = s32[] add(i, one) ROOT t = (s32[], f32[4]) tuple(j, more) }}
condition {{ s = (s32[], f32[4]) parameter(0) i = s32[] get-tuple-element(s), index=0
n = s32[] constant(2) ROOT l = pred[] compare(i, n), direction=LT }}
ENTRY main {{ x = f32[4] parameter(0) zero = s32[] constant(0) t = (s32[], f32[4]) tuple(zero, x)
w = (s32[], f32[4]) while(t), condition=condition, body=body
ROOT r = f32[4] get-tuple-element(w), index=1 }}"""
    bounded = fusion.bounded(hlo_module_from_text(text).as_serialized_hlo_module_proto())
    assert any(each.opcode == "call" for each in hlo.instructions(bounded))
    (found,) = computed(bounded, [np.array([1, -1, 2, 0], np.float32)])
    np.testing.assert_array_equal(found, [4, 0, 8, 0])
