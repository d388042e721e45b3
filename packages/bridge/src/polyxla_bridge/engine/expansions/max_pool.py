"""The gradient of max-pooling. Importing this module imports jax.

XLA:CPU runs select-and-scatter on a single thread. The C library takes its place; where a program cannot call
the library, a reduce-window finds the position that each window chose, and each element then adds up the
windows that chose it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax, numpy

from polyxla_bridge.engine.expansions import inlining
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.hlo_pb2 import HloComputationProto as Computation
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction

TARGET = "polyxla_max_pool_gradient"
"""The C library's function."""
_POOLED = 3
"""Dimensions, the last of an array, that the function pools."""
_IN_LIBRARY = frozenset(("float32", "bfloat16", "float16"))

_EARLIER: dict[str, Callable[..., Any]] = {"GE": lax.lt, "GT": lax.gt}
"""For each comparison that keeps a maximum, the test that chooses the first or the last of equal elements."""


def choose(
    instruction: Instruction, program: inlining.Program, *, calls_library: bool
) -> inlining.Function | None:
    """Return the function that computes a max-pooling's gradient; None for any other instruction.

    Args:
        instruction: any instruction.
        program: its program.
        calls_library: whether the program may call the C library.
    """
    if instruction.opcode != "select-and-scatter":
        return None
    windows = instruction.window.dimensions
    select, scatter = (_root(program.computations[id_]) for id_ in instruction.called_computation_ids)
    # The expansion computes only the gradient of max-pooling; XLA's instruction stays for all other forms.
    is_dilated = any(window.window_dilation > 1 or window.base_dilation > 1 for window in windows)
    is_cropped = any(window.padding_low < 0 or window.padding_high < 0 for window in windows)
    if select not in _EARLIER or scatter != "add" or is_dilated or is_cropped:
        return None
    numbers: dict[str, Any] = {
        "size": [window.size for window in windows],
        "strides": [window.stride for window in windows],
        "low": [window.padding_low for window in windows],
    }
    is_pooled = [
        (window.size, window.stride, window.padding_low, window.padding_high) != (1, 1, 0, 0)
        for window in windows
    ]
    dtype, dims = hlo.array_type(instruction.shape)
    fits = dtype in _IN_LIBRARY and not any(is_pooled[:-_POOLED]) and math.prod(dims[-_POOLED:]) < 1 << 31
    if calls_library and fits:
        return partial(_in_library, is_last=select == "GT", **numbers)
    return partial(_gradient, is_chosen=_EARLIER[select], **numbers)


def _root(computation: Computation) -> str:
    """Return what a computation does to its two parameters: a comparison, an opcode, or nothing known."""
    (root,) = (
        instruction for instruction in computation.instructions if instruction.id == computation.root_id
    )
    numbers = {
        instruction.id: instruction.parameter_number
        for instruction in computation.instructions
        if instruction.opcode == "parameter"
    }
    if [numbers.get(id_) for id_ in root.operand_ids] != [0, 1]:
        return ""
    return root.comparison_direction if root.opcode == "compare" else root.opcode


def _in_library(
    operand: jax.Array,
    source: jax.Array,
    initial: jax.Array,
    *,
    size: list[int],
    strides: list[int],
    low: list[int],
    is_last: bool,
) -> jax.Array:
    """Return the gradient of the pooled array; numbers of other dtypes are added in float32."""

    def planes(array: jax.Array) -> jax.Array:
        pooled = [*[1] * _POOLED, *array.shape][-_POOLED:]
        return lax.reshape(array.astype(numpy.float32), [math.prod(array.shape[:-_POOLED]), *pooled])

    def numbers(of_all: list[int], missing: int) -> np.ndarray[Any, Any]:
        return np.array([*[missing] * _POOLED, *of_all][-_POOLED:], np.int64)

    array = planes(operand)
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(array.shape, array.dtype))  # type: ignore[no-untyped-call]
    gradient = call(
        array,
        planes(source),
        initial.astype(numpy.float32),
        window=numbers(size, 1),
        stride=numbers(strides, 1),
        low=numbers(low, 0),
        is_last=np.int64(is_last),
    )
    whole: jax.Array = lax.reshape(gradient, operand.shape).astype(operand.dtype)
    return whole


def _gradient(
    operand: jax.Array,
    source: jax.Array,
    initial: jax.Array,
    *,
    size: list[int],
    strides: list[int],
    low: list[int],
    is_chosen: Callable[..., Any],
) -> jax.Array:
    """Return the gradient of the pooled array."""
    # In each dimension, `reach` windows contain an element, and `blocks` strides cover the operand.
    reach = [-(-length // stride) for length, stride in zip(size, strides, strict=True)]
    blocks = [
        -(-(dim + first) // stride) for dim, first, stride in zip(operand.shape, low, strides, strict=True)
    ]
    # The windows that begin before the first block but reach into it count, too.
    count = [block + more - 1 for block, more in zip(blocks, reach, strict=True)]
    before = [first + (more - 1) * stride for first, more, stride in zip(low, reach, strides, strict=True)]
    padding = [
        (first, max(0, (many - 1) * stride + length - first - dim))
        for many, stride, length, first, dim in zip(count, strides, size, before, operand.shape, strict=True)
    ]
    ones = [1] * operand.ndim
    position = _positions(list(operand.shape), ones, operand.shape, [0] * operand.ndim)

    def choose(kept: tuple[Any, Any], new: tuple[Any, Any]) -> tuple[Any, Any]:
        (value, at), (other, other_at) = kept, new
        # XLA may visit a window in any order, so the positions decide between equal elements. Position -1 is
        # outside of the array.
        wins = lax.gt(value, other) | (lax.eq(value, other) & is_chosen(at, other_at))
        # torch takes the last NaN of a window as its maximum.
        is_nan, other_is_nan = lax.ne(value, value), lax.ne(other, other)
        wins = lax.select(other_is_nan, is_nan & lax.gt(at, other_at), is_nan | wins)
        keeps = (other_at < 0) | ((at >= 0) & wins)
        return lax.select(keeps, value, other), lax.select(keeps, at, other_at)

    initials = (lax.full((), 0, operand.dtype), lax.full((), -1, position.dtype))
    _, chosen = lax.reduce_window((operand, position), initials, choose, size, strides, padding)
    edges = [
        (more - 1, many - dim - (more - 1), 0)
        for more, many, dim in zip(reach, count, source.shape, strict=True)
    ]
    padded = lax.pad(source, lax.full((), 0, source.dtype), edges)
    spread = [length for pair in zip(blocks, strides, strict=True) for length in pair]
    places = range(0, len(spread), 2)
    own = lax.reshape(_positions(blocks, strides, operand.shape, low), spread)
    total = lax.broadcast(initial, spread)
    # Add in the order of the windows, as XLA does, because another order would round differently.
    for start in itertools.product(*map(range, reach)):
        stop = [first + block for first, block in zip(start, blocks, strict=True)]
        is_own = lax.eq(lax.broadcast_in_dim(lax.slice(chosen, start, stop), spread, places), own)
        parts = lax.broadcast_in_dim(lax.slice(padded, start, stop), spread, places)
        total = total + lax.select(is_own, parts, lax.full_like(parts, 0))
    whole = lax.reshape(total, [block * stride for block, stride in zip(blocks, strides, strict=True)])
    return lax.slice(whole, low, [first + dim for first, dim in zip(low, operand.shape, strict=True)])


def _positions(blocks: list[int], strides: list[int], dims: tuple[int, ...], low: list[int]) -> jax.Array:
    """Return each element's position in an array of size `dims`, which begins after `low` elements."""
    shape = [block * stride for block, stride in zip(blocks, strides, strict=True)]
    total, weight = lax.full(shape, 0, "int64"), 1
    for dimension in reversed(range(len(dims))):
        along = lax.broadcasted_iota("int64", shape, dimension) - low[dimension]
        total, weight = total + along * weight, weight * dims[dimension]
    return total
