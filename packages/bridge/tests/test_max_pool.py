"""The gradient of max-pooling without XLA's select-and-scatter, compared with what XLA computes by it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from jaxlib._hlo import HloModule, hlo_module_from_text  # type: ignore[import-not-found]

from polyxla_bridge.engine.expansions import inlining, max_pool

Computed = Callable[[bytes, list[np.ndarray[Any, Any]]], list[np.ndarray[Any, Any]]]

DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


def program(dtype: str, dims: list[int], pooled: list[int], window: str, *forms: tuple[str, str]) -> bytes:
    """Return a program with a select-and-scatter for each pair of a comparison and an operation."""
    reducers = "".join(
        f""" select{number} {{ a = T[] parameter(0) b = T[] parameter(1)
          ROOT c = pred[] compare(a, b), direction={select} }}
        scatter{number} {{ a = T[] parameter(0) b = T[] parameter(1) ROOT c = T[] {scatter}(a, b) }}"""
        for number, (select, scatter) in enumerate(forms)
    )
    results = "".join(
        f""" r{number} = T{dims} select-and-scatter(x, g, z), window={{{window}}}, select=select{number},
          scatter=scatter{number}"""
        for number in range(len(forms))
    )
    names = ", ".join(f"r{number}" for number in range(len(forms)))
    types = ", ".join([f"T{dims}"] * len(forms))
    text = f"""HloModule pool {reducers}
    ENTRY main {{ x = T{dims} parameter(0) g = T{pooled} parameter(1) z = T[] constant(0)
      {results} ROOT all = ({types}) tuple({names}) }}"""
    text = re.sub(r"\bT\[", f"{dtype}[", text).replace(", ", ",")
    data: bytes = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return data


def replaced(data: bytes, *, calls_library: bool) -> bytes:
    return inlining.replace(data, partial(max_pool.choose, calls_library=calls_library))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dims", "pooled", "window"),
    [
        ([2, 3, 8, 6], [2, 3, 4, 3], "size=1x1x2x2 stride=1x1x2x2"),
        ([2, 3, 9, 9], [2, 3, 4, 4], "size=1x1x2x2 stride=1x1x2x2"),
        ([2, 3, 9, 8], [2, 3, 5, 4], "size=1x1x3x3 stride=1x1x2x2 pad=0_0x0_0x1_1x1_1"),
        ([2, 2, 7, 7], [2, 2, 7, 7], "size=1x1x3x3 pad=0_0x0_0x1_1x1_1"),
        ([1, 2, 12, 6], [1, 2, 4, 2], "size=1x1x2x2 stride=1x1x3x3"),
        ([1, 2, 11, 5], [1, 2, 4, 2], "size=1x1x2x2 stride=1x1x3x3"),
        # Features last, one dimension, three, and rows of more windows than the library takes together.
        ([2, 8, 6, 3], [2, 4, 3, 3], "size=1x2x2x1 stride=1x2x2x1"),
        ([2, 3, 9], [2, 3, 5], "size=1x1x3 stride=1x1x2 pad=0_0x0_0x1_1"),
        ([9], [4], "size=3 stride=2"),
        ([1, 2, 4, 5, 6], [1, 2, 2, 2, 3], "size=1x1x2x2x2 stride=1x1x2x2x2"),
        ([3, 2, 150], [3, 2, 149], "size=1x1x2"),
        ([40, 20, 12, 12], [40, 20, 6, 6], "size=1x1x2x2 stride=1x1x2x2"),
    ],
)
def test_the_expansion_computes_what_the_instruction_does(
    dtype: str, dims: list[int], pooled: list[int], window: str, computed: Computed
) -> None:
    data = program(dtype, dims, pooled, window, ("GE", "add"), ("GT", "add"))
    numbers = np.random.default_rng(0)
    # Small integers: many windows have several maxima, and sums are exact in any order.
    arguments = [numbers.integers(-2, 3, shape).astype(DTYPES[dtype]) for shape in (dims, pooled)]
    with jax.enable_x64(True):
        expected = computed(data, arguments)
    for calls_library in (True, False):
        with jax.enable_x64(True):
            expanded = replaced(data, calls_library=calls_library)
            found = computed(expanded, arguments)
        text = HloModule.from_serialized_hlo_module_proto(expanded).to_string()
        assert "select-and-scatter(" not in text
        assert text.count(max_pool.TARGET) == (2 if calls_library else 0)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("select", "scatter"), [("LE", "add"), ("GE", "multiply")])
def test_other_forms_stay_as_they_are(select: str, scatter: str) -> None:
    data = program("f32", [1, 1, 4, 4], [1, 1, 2, 2], "size=1x1x2x2 stride=1x1x2x2", (select, scatter))
    assert replaced(data, calls_library=True) is data


@pytest.mark.parametrize("calls_library", [True, False])
@pytest.mark.parametrize("select", ["GE", "GT"])
def test_the_gradient_goes_to_the_last_nan_of_a_window(
    select: str, computed: Computed, *, calls_library: bool
) -> None:
    data = program("f32", [1, 1, 2, 6], [1, 1, 1, 3], "size=1x1x2x2 stride=1x1x2x2", (select, "add"))
    with jax.enable_x64(True):
        expanded = replaced(data, calls_library=calls_library)
    numbers = np.array([[1, np.nan, 3, 4, 5, 7], [np.nan, 2, 3, np.inf, 5, 7]], np.float32).reshape(
        1, 1, 2, 6
    )
    image = torch.from_numpy(numbers.copy()).requires_grad_()
    weights = torch.tensor([1.0, 2, 3]).reshape(1, 1, 1, 3)
    (expected,) = torch.autograd.grad(torch.nn.functional.max_pool2d(image, 2), image, weights)
    with jax.enable_x64(True):
        (found,) = computed(expanded, [numbers, weights.numpy()])
    # The last window has two equal maxima.
    np.testing.assert_array_equal(found[..., :4], expected.numpy()[..., :4])


def test_a_window_without_elements_gives_its_gradient_to_none(computed: Computed) -> None:
    window = "size=1x1x2x2 stride=1x1x2x2 pad=0_0x0_0x2_2x0_0"
    data = program("f32", [1, 1, 4, 4], [1, 1, 4, 2], window, ("GE", "add"))
    arguments = [np.ones(dims, np.float32) for dims in ([1, 1, 4, 4], [1, 1, 4, 2])]
    (found,) = computed(replaced(data, calls_library=True), arguments)
    np.testing.assert_array_equal(found.sum(), 4)


@pytest.mark.parametrize(
    ("dims", "pooled", "window"),
    [
        ([2, 6, 4, 4, 4], [2, 3, 2, 2, 2], "size=1x2x2x2x2 stride=1x2x2x2x2"),
        ([2, 6, 4], [1, 3, 2], "size=2x2x2 stride=2x2x2"),
    ],
)
def test_the_library_pools_the_last_three_dimensions(dims: list[int], pooled: list[int], window: str) -> None:
    data = program("f32", dims, pooled, window, ("GE", "add"))
    with jax.enable_x64(True):
        text = HloModule.from_serialized_hlo_module_proto(replaced(data, calls_library=True)).to_string()
    assert (max_pool.TARGET in text) is (len(dims) == 3)
