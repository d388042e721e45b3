"""Sums of the numbers of an array. Importing this module imports jax.

XLA:CPU keeps a sum of bfloat16 or float16 numbers in their own type, and rounds it after each of them: 256
equal numbers of bfloat16 are the most that it can add. PyTorch's CPU and GPUs add in float32, and round once.
So do sums over dimensions, over windows, as of average pools, and those of a scatter, as of an embedding's
gradient.

A sum over the first dimensions, as for the gradient of a layer's bias, is one of columns; one over the first
and the last, as for that of a convolution's bias, is one of features. XLA:CPU adds their numbers one by one,
and not as vectors; the C library does.
"""

from __future__ import annotations

import math
from functools import partial

import jax
from jax import numpy

from polyxla_bridge.engine.expansions import batch_norm, inlining
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.hlo_pb2 import HloComputationProto as Computation
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction
from polyxla_bridge.programs.hlo_pb2 import HloModuleProto as Module
from polyxla_bridge.programs.hlo_pb2 import ShapeProto as Shape

TARGET, FEATURES_TARGET = "polyxla_column_sums", "polyxla_feature_sums"
"""The C library's functions."""
LEAST_SIZE = 1 << 18
"""Numbers in an array below which XLA's sum of its columns is as fast."""
_LEAST_COLUMNS = 16
_SUMS = {"reduce": 2, "reduce-window": 2, "scatter": 3}
"""Instructions that add numbers of one array, with that number of operands."""


def choose(
    instruction: Instruction, program: inlining.Program, *, calls_library: bool
) -> inlining.Function | Module | None:
    """Return what computes a sum; None for another instruction, or if XLA's is to stay.

    Args:
        instruction: any instruction.
        program: its program.
        calls_library: whether the program may call the C library.
    """
    if len(instruction.operand_ids) != _SUMS.get(instruction.opcode):
        return None
    adding = program.computations[instruction.called_computation_ids[0]]
    dtype, dims = hlo.array_type(program.instructions[instruction.operand_ids[0]].shape)
    if hlo.reduction(adding) != "add" or dtype not in (*hlo.NARROW, "float32"):
        return None
    if calls_library and instruction.opcode == "reduce":
        summed = tuple(sorted(instruction.dimensions))
        columns = dims[len(summed) :]
        is_of_columns = summed == tuple(range(len(summed))) and math.prod(columns) >= _LEAST_COLUMNS
        if is_of_columns and math.prod(dims) >= LEAST_SIZE:
            return partial(_in_library, columns)
        first, last = _kept(summed, len(dims))
        if 0 < first < last < len(dims) and batch_norm.are_large(dims, first, last):
            return partial(_of_features, first, last)
    return _in_float32(instruction, adding, program) if dtype in hlo.NARROW else None


def _kept(summed: tuple[int, ...], rank: int) -> tuple[int, int]:
    """Return the range of the dimensions that are not summed; an empty one if they are not adjacent."""
    kept = [dimension for dimension in range(rank) if dimension not in summed]
    return (kept[0], kept[-1] + 1) if kept and kept[-1] - kept[0] < len(kept) else (0, 0)


def _in_float32(instruction: Instruction, adding: Computation, program: inlining.Program) -> Module:
    """Return the program that adds narrow numbers in float32, and rounds once."""
    module = Module(name="sum", entry_computation_id=2)
    wide_adding, entry = module.computations.add(), module.computations.add(name="entry", id=2)
    wide_adding.CopyFrom(adding)
    wide_adding.id = 1
    for step in wide_adding.instructions:
        step.shape.element_type = hlo.F32
    numbers: list[int] = []
    for number, operand in enumerate(instruction.operand_ids):
        shape = program.instructions[operand].shape
        given = entry.instructions.add(opcode="parameter", name="given", id=2 * number + 1)
        given.parameter_number = number
        given.shape.CopyFrom(shape)
        module.host_program_shape.parameters.append(shape)
        numbers.append(given.id)
        # The indices of a scatter stay as they are.
        if hlo.array_type(shape)[0] in hlo.NARROW:
            made = entry.instructions.add(opcode="convert", name="wide", id=2 * number + 2)
            made.shape.CopyFrom(_float32(shape))
            made.operand_ids.append(given.id)
            numbers[-1] = made.id
    total, rounded = entry.instructions.add(), entry.instructions.add(opcode="convert", name="rounded")
    total.CopyFrom(instruction)
    total.id, rounded.id = 2 * len(numbers) + 1, 2 * len(numbers) + 2
    total.shape.CopyFrom(_float32(instruction.shape))
    total.operand_ids[:], total.called_computation_ids[:] = numbers, [wide_adding.id]
    rounded.shape.CopyFrom(instruction.shape)
    rounded.operand_ids.append(total.id)
    entry.root_id = rounded.id
    return module


def _float32(shape: Shape) -> Shape:
    wide = Shape()
    wide.CopyFrom(shape)
    wide.element_type = hlo.F32
    return wide


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
