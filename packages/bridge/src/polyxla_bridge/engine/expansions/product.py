"""Products of matrices as calls of the C library, which has torch's. Importing this module imports jax.

XLA:CPU is as fast as torch, unless it must transpose the left matrix, as for the gradient of a weight.
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


def choose(instruction: Instruction, program: inlining.Program) -> inlining.Function | None:
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
