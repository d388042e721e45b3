"""Batch norm without XLA's batch norm instructions, compared with what XLA computes by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jaxlib._hlo import HloModule, hlo_module_from_text  # type: ignore[import-not-found]

from polyxla_bridge.engine.expansions import batch_norm, cpu, inlining
from polyxla_bridge.programs import hlo

Computed = Callable[[bytes, list[np.ndarray[Any, Any]]], list[np.ndarray[Any, Any]]]

SHAPES = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}
KINDS = {
    "batch-norm-training": ("x, scale, offset", "(T[S], T[F], T[F])"),
    "batch-norm-inference": ("x, scale, offset, mean, variance", "T[S]"),
    "batch-norm-grad": ("x, scale, mean, variance, other", "(T[S], T[F], T[F])"),
}


def program(kind: str, dtype: str, dims: tuple[int, ...], feature: int, twice: bool = False) -> bytes:
    """Return a program with one batch norm, or with another one of its result."""
    operands, result = KINDS[kind]
    how = f"epsilon=0.01, feature_index={feature}"
    first = f"n = R {kind}({operands}), {how}"
    last = first.replace("n =", "ROOT n =")
    if twice:
        normalized = "n" if kind == "batch-norm-inference" else "get-tuple-element(n), index=0"
        normalized = f"m = T[S] {normalized}" if "get" in normalized else f"m = T[S] copy({normalized})"
        last = f"{first} {normalized} ROOT r = R {kind}({operands.replace('x,', 'm,')}), {how}"
    text = f"""HloModule norm
    ENTRY main {{ x = T[S] parameter(0) scale = T[F] parameter(1) offset = T[F] parameter(2)
      mean = T[F] parameter(3) variance = T[F] parameter(4) other = T[S] parameter(5)
      {last} }}"""
    text = text.replace("R ", f"{result} ").replace("T[", f"{dtype}[")
    text = text.replace("[S]", str(list(dims)).replace(" ", "")).replace("[F]", f"[{dims[feature]}]")
    data: bytes = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return data


def random_arguments(dtype: str, dims: tuple[int, ...], feature: int) -> list[np.ndarray[Any, Any]]:
    numbers = np.random.default_rng(0)
    shapes = [dims, *[(dims[feature],)] * 4, dims]
    return [(numbers.random(shape) + 0.5).astype(SHAPES[dtype]) for shape in shapes]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "dims", "feature"),
    [
        ("f32", (6, 3, 4, 5), 1),
        ("f32", (1, 8, 5), 1),
        ("f32", (7, 4), 0),
        ("f64", (5, 4), 1),
        ("bf16", (6, 4), 1),
    ],
)
@pytest.mark.parametrize("twice", [False, True])
def test_the_expansion_computes_what_the_instruction_does(
    kind: str, dtype: str, dims: tuple[int, ...], feature: int, twice: bool, computed: Computed
) -> None:
    data = program(kind, dtype, dims, feature, twice)
    with jax.enable_x64(True):
        expanded = inlining.replace(data, batch_norm.choose)
    text = HloModule.from_serialized_hlo_module_proto(expanded).to_string()
    assert " batch-norm" not in text
    assert " call(" not in text, "the partitioner does not look into calls"

    arguments = random_arguments(dtype, dims, feature)
    with jax.enable_x64(True):
        expected, found = computed(data, arguments), computed(expanded, arguments)
    assert len(expected) == len(found) == (1 if kind == "batch-norm-inference" else 3)
    precision = {"f64": 1e-9, "f32": 1e-4, "bf16": 0.06}[dtype]
    for array, other in zip(expected, found, strict=True):
        assert array.dtype == other.dtype
        np.testing.assert_allclose(
            other.astype(np.float64), array.astype(np.float64), rtol=precision, atol=precision
        )


def test_a_program_without_batch_norms_stays_as_it_is() -> None:
    data: bytes = hlo_module_from_text(
        "HloModule plain ENTRY main { x = f32[2] parameter(0) ROOT y = f32[2] add(x, x) }"
    ).as_serialized_hlo_module_proto()
    assert inlining.replace(data, batch_norm.choose) is data


@pytest.mark.parametrize("kind", ["batch-norm-training", "batch-norm-grad"])
@pytest.mark.parametrize(
    ("dims", "feature"),
    [
        ((128, 10, 12, 12), 1),
        ((3, 5, 30, 30), 1),
        # The last numbers fill neither a vector nor a chunk.
        ((2, 3, 1500), 1),
        ((130, 9, 2, 4), 1),
        ((2, 4, 6, 7, 33), 2),
        ((1, 1, 9000), 1),
        ((4, 3000), 0),
    ],
)
@pytest.mark.parametrize("twice", [False, True])
def test_the_library_computes_what_the_instruction_does(
    kind: str, dims: tuple[int, ...], feature: int, twice: bool, computed: Computed
) -> None:
    data = program(kind, "f32", dims, feature, twice)
    replaced = inlining.replace(data, batch_norm.choose_in_library)
    assert hlo.called_targets(replaced) == {
        batch_norm.TARGET if kind == "batch-norm-training" else batch_norm.GRADIENT_TARGET
    }

    arguments = random_arguments("f32", dims, feature)
    for array, other in zip(computed(data, arguments), computed(replaced, arguments), strict=True):
        # Sums grow with the number of places.
        np.testing.assert_allclose(other, array, rtol=2e-4, atol=1e-5 * np.abs(array).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("is_partitioned", [False, True])
def test_results_of_narrow_numbers_are_rounded_once(
    kind: str, dtype: str, is_partitioned: bool, computed: Computed
) -> None:
    dims = (60, 4, 20)
    arguments = random_arguments(dtype, dims, 1)
    with jax.enable_x64(True):
        exact = computed(program(kind, "f64", dims, 1), [array.astype(np.float64) for array in arguments])
    rounding = {"f16": 2**-10, "bf16": 2**-7}[dtype]

    def error(data: bytes) -> float:
        """Return how far the results are from the exact ones, beyond one rounding of each number."""
        return max(
            float((np.abs(found.astype(np.float64) - array) - rounding * np.abs(array)).max())
            for found, array in zip(computed(data, arguments), exact, strict=True)
        )

    data = program(kind, dtype, dims, 1)
    assert error(cpu.expanded(data, is_partitioned=is_partitioned)) < 1e-5
    # XLA itself computes those of bfloat16 in float32.
    assert (error(data) > 1e-4) == (dtype == "f16")


@pytest.mark.parametrize("dims", [(16, 4, 32, 32), (8, 4)])
def test_the_variance_is_exact_where_the_mean_is_large(dims: tuple[int, ...], computed: Computed) -> None:
    data = program("batch-norm-training", "f32", dims, 1)
    arguments = random_arguments("f32", dims, 1)
    arguments[0] += 1000
    exact = arguments[0].astype(np.float64).var(axis=(0, *range(2, len(dims))))
    own, of_xla = (
        np.abs(computed(each, arguments)[2] / exact - 1).max()
        for each in (cpu.expanded(data, is_partitioned=False, calls_library=True), data)
    )
    assert own < 1e-4 < of_xla


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_number_that_is_none_spoils_only_its_feature(number: float, computed: Computed) -> None:
    dims = (8, 4, 32, 32)
    arguments = random_arguments("f32", dims, 1)
    arguments[0][3, 2, 1, 0] = number
    data = program("batch-norm-training", "f32", dims, 1)
    result, *_ = computed(inlining.replace(data, batch_norm.choose_in_library), arguments)
    assert np.isfinite(result).all(axis=(0, 2, 3)).tolist() == [True, True, False, True]
    assert np.isnan(result[:, 2]).all()


@pytest.mark.parametrize(
    ("kind", "dtype", "dims", "feature"),
    [
        ("batch-norm-training", "f32", (2, 4, 5), 1),
        ("batch-norm-training", "f32", (300, 100), 1),
        ("batch-norm-training", "f32", (1, 8000, 128), 1),
        ("batch-norm-training", "bf16", (8, 16, 32, 32), 1),
        ("batch-norm-grad", "f64", (8, 16, 32, 32), 1),
        ("batch-norm-grad", "f32", (0, 16, 32, 32), 1),
        ("batch-norm-inference", "f32", (8, 16, 32, 32), 1),
    ],
)
def test_batch_norms_that_xla_computes_as_fast_stay(
    kind: str, dtype: str, dims: tuple[int, ...], feature: int
) -> None:
    data = program(kind, dtype, dims, feature)
    assert inlining.replace(data, batch_norm.choose_in_library) is data
