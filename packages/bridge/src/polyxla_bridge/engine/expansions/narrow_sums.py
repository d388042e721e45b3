"""Sums of bfloat16 and float16 numbers. Importing this module imports jax.

XLA:CPU keeps the sum in the numbers' own type, and rounds it after each of them. PyTorch's CPU and GPUs add
in float32, and round once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
from jax import lax, numpy

from polyxla_bridge.engine.expansions import inlining
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.hlo_pb2 import HloComputationProto as Computation
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction

_NARROW = {"bfloat16", "float16"}


def choose(instruction: Instruction, computations: Mapping[int, Computation]) -> inlining.Function | None:
    """Return the function that computes such a sum; None for any other instruction."""
    if instruction.opcode != "reduce" or len(instruction.operand_ids) != 2:
        return None
    (called,) = instruction.called_computation_ids
    opcodes = [step.opcode for step in computations[called].instructions]
    if opcodes != ["parameter", "parameter", "add"] or hlo.array_type(instruction.shape)[0] not in _NARROW:
        return None
    return partial(_sum, tuple(instruction.dimensions))


def _sum(dimensions: tuple[int, ...], numbers: jax.Array, initial: jax.Array) -> jax.Array:
    wide = lax.reduce(numbers.astype(numpy.float32), initial.astype(numpy.float32), lax.add, dimensions)
    narrow: jax.Array = wide.astype(numbers.dtype)
    return narrow
