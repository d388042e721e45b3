"""Powers and products that XLA:CPU computes slowly. Importing this module imports jax.

TorchTPU passes the exponent of ``x ** 3`` to a program, unless it compiles a whole model. XLA does not know
it, and calls ``powf`` for each number: a quarter of a step of a transformer block. torch multiplies.

XLA's product of matrices is as fast as torch's, unless it must transpose the left matrix, as for the gradient
of a weight: then the C library calls torch's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
from jax import lax, numpy

from polyxla_bridge.engine.expansions import inlining, torch_library
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction

TARGET = "polyxla_product"
"""The C library's function."""
LEAST_WORK = 1 << 24
"""Multiplications below which XLA's product is as fast. Measured on 2 cores: with more, torch needs half to
nine tenths of the time."""


def choose_power(instruction: Instruction, program: inlining.Program) -> inlining.Function | None:
    """Return the function for a power whose one exponent is an argument; None for any other instruction."""
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


@dataclass(frozen=True)
class _Product:
    """A product in which the first dimensions of both arrays are summed.

    Attributes:
        count: of those dimensions.
        is_transposed: whether the left array has them last, because the program has transposed it.
    """

    count: int
    is_transposed: bool

    def __call__(self, left: jax.Array, right: jax.Array) -> jax.Array:
        """Return the product."""
        if self.is_transposed:
            left = lax.transpose(left, (1, 0))
        rows, columns = left.shape[self.count :], right.shape[self.count :]
        inner = math.prod(left.shape[: self.count])
        flat = jax.ShapeDtypeStruct((math.prod(rows), math.prod(columns)), numpy.float32)  # type: ignore[no-untyped-call]
        product: jax.Array = jax.ffi.ffi_call(TARGET, flat)(left.reshape(inner, -1), right.reshape(inner, -1))
        return product.reshape(*rows, *columns)


def choose_product(instruction: Instruction, program: inlining.Program) -> inlining.Function | None:
    """Return torch's function for a product; None for another instruction, or if XLA's is as fast."""
    if instruction.opcode != "dot":
        return None
    numbers = instruction.dot_dimension_numbers
    left, right = (program.instructions[number] for number in instruction.operand_ids)
    dtypes = {hlo.array_type(array.shape)[0] for array in (instruction, left, right)}
    if dtypes != {"float32"} or numbers.lhs_batch_dimensions:
        return None
    of_left, of_right = list(numbers.lhs_contracting_dimensions), list(numbers.rhs_contracting_dimensions)
    is_transposed = left.opcode == "transpose" and list(left.dimensions) == [1, 0] and of_left == [1]
    first = list(range(len(of_right)))
    if not first or of_right != first or not (is_transposed or of_left == first):
        return None
    inner = math.prod(right.shape.dimensions[: len(first)])
    is_large = inner * math.prod(instruction.shape.dimensions) >= LEAST_WORK
    return _Product(len(first), is_transposed) if is_large and torch_library.is_open() else None
