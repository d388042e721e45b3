"""Sums over dimensions of an array. Importing this module imports jax.

XLA:CPU keeps a sum of bfloat16 or float16 numbers in their own type, and rounds it after each of them.
PyTorch's CPU and GPUs add in float32, and round once.

A sum over the first dimensions, as for the gradient of a layer's bias, is one of columns; one over the first
and the last, as for that of a convolution's bias, is one of features. XLA:CPU adds their numbers one by one,
and not as vectors; the C library does.
"""

from __future__ import annotations

import math
from functools import partial

import jax
from jax import lax, numpy

from polyxla_bridge.engine.expansions import batch_norm, inlining
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction

TARGET, FEATURES_TARGET = "polyxla_column_sums", "polyxla_feature_sums"
"""The C library's functions."""
LEAST_SIZE = 1 << 18
"""Numbers in an array below which XLA's sum of its columns is as fast."""
_LEAST_COLUMNS = 16
_NARROW = frozenset(("bfloat16", "float16"))


def choose(
    instruction: Instruction, program: inlining.Program, *, calls_library: bool
) -> inlining.Function | None:
    """Return the function that computes a sum; None for another instruction, or if XLA's is to stay.

    Args:
        instruction: any instruction.
        program: its program.
        calls_library: whether the program may call the C library.
    """
    if instruction.opcode != "reduce" or len(instruction.operand_ids) != 2:
        return None
    (called,) = instruction.called_computation_ids
    opcodes = [step.opcode for step in program.computations[called].instructions]
    dtype, dims = hlo.array_type(program.instructions[instruction.operand_ids[0]].shape)
    if opcodes != ["parameter", "parameter", "add"] or dtype not in (*_NARROW, "float32"):
        return None
    summed = tuple(sorted(instruction.dimensions))
    columns = dims[len(summed) :]
    is_of_columns = summed == tuple(range(len(summed))) and math.prod(columns) >= _LEAST_COLUMNS
    if calls_library and is_of_columns and math.prod(dims) >= LEAST_SIZE:
        return partial(_in_library, columns)
    first, last = _kept(summed, len(dims))
    is_of_features = 0 < first < last < len(dims)
    if calls_library and is_of_features and batch_norm.are_large(dims, first, last):
        return partial(_of_features, first, last)
    return partial(_add, summed) if dtype in _NARROW else None


def _kept(summed: tuple[int, ...], rank: int) -> tuple[int, int]:
    """Return the range of the dimensions that are not summed; an empty one if they are not adjacent."""
    kept = [dimension for dimension in range(rank) if dimension not in summed]
    return (kept[0], kept[-1] + 1) if kept and kept[-1] - kept[0] < len(kept) else (0, 0)


def _add(dimensions: tuple[int, ...], numbers: jax.Array, initial: jax.Array) -> jax.Array:
    wide = lax.reduce(numbers.astype(numpy.float32), initial.astype(numpy.float32), lax.add, dimensions)
    narrow: jax.Array = wide.astype(numbers.dtype)
    return narrow


def _in_library(columns: tuple[int, ...], numbers: jax.Array, initial: jax.Array) -> jax.Array:
    count = math.prod(columns)
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((count,), numpy.float32))  # type: ignore[no-untyped-call]
    matrix = numbers.astype(numpy.float32).reshape(-1, count)
    sums: jax.Array = call(matrix, initial.astype(numpy.float32))
    return sums.reshape(columns).astype(numbers.dtype)


def _of_features(first: int, last: int, numbers: jax.Array, initial: jax.Array) -> jax.Array:
    array = batch_norm.by_feature(numbers.astype(numpy.float32), first, last)
    call = jax.ffi.ffi_call(FEATURES_TARGET, jax.ShapeDtypeStruct(array.shape[1:2], numpy.float32))  # type: ignore[no-untyped-call]
    sums: jax.Array = call(array, initial.astype(numpy.float32))
    return sums.reshape(numbers.shape[first:last]).astype(numbers.dtype)
