"""Powers with one exponent for all numbers, as an argument. Importing this module imports jax.

TorchTPU passes the exponent of ``x ** 3`` to a program, unless it compiles a whole model. XLA does not know
it, and calls ``powf`` for each number: a quarter of a step of a transformer block. torch multiplies.
"""

from __future__ import annotations

import jax
from jax import lax, numpy

from polyxla_bridge.engine.expansions import inlining
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction


def choose(instruction: Instruction, program: inlining.Program) -> inlining.Function | None:
    """Return the function that computes such a power; None for any other instruction."""
    if instruction.opcode != "power":
        return None
    exponents = program.instructions[instruction.operand_ids[1]]
    dtype, dims = hlo.array_type(instruction.shape)
    if exponents.opcode != "broadcast" or 0 in dims or dtype not in (*hlo.NARROW, "float32", "float64"):
        return None
    exponent = program.instructions[exponents.operand_ids[0]]
    is_argument = exponent.opcode != "constant" and not exponent.shape.dimensions
    return _power if is_argument else None


def _power(numbers: jax.Array, exponents: jax.Array) -> jax.Array:
    exponent = lax.slice(exponents, (0,) * exponents.ndim, (1,) * exponents.ndim).reshape(())
    which = (exponent == 2).astype(numpy.int32) + 2 * (exponent == 3).astype(numpy.int32)
    # XLA computes a power of narrow numbers in float32, too.
    wide = numbers.astype(numpy.float32) if numbers.dtype.name in hlo.NARROW else numbers
    ways = (
        lambda wide, exponent: lax.pow(wide, lax.full_like(wide, exponent)),
        lambda wide, _: wide * wide,
        lambda wide, _: wide * wide * wide,
    )
    power: jax.Array = lax.switch(which, ways, wide, exponent.astype(wide.dtype))
    return power.astype(numbers.dtype)
