"""Products of float32 as a TPU computes them.

A TPU multiplies bfloat16 and adds in float32. What becomes of float32 depends on the precision that the
program asks for: with the default, each operand is rounded to bfloat16. A high precision takes three products
of the operands' leading and remaining bits, and the highest one is about float32.
"""

from __future__ import annotations

from functools import partial

from polyxla_bridge.programs import hlo, kernels, rewrite
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction
from polyxla_bridge.programs.hlo_pb2 import ShapeProto as Shape

NAME = " with a TPU's products"
"""Follows the name of a compiler whose programs were rewritten here."""
PRODUCTS = ("dot", "convolution", "ragged-dot")
_DEFAULT, _HIGH, _HIGHEST = range(3)
_ALGORITHMS = {6: _DEFAULT, 7: _HIGH}
"""The algorithms that a TPU's default and high precision stand for: one and three products of bfloat16.

Source: PrecisionConfig in xla/xla_data.proto, for the numbers of these and of the precisions.
"""
_EXPONENT_BITS, _MANTISSA_BITS = 8, 7
"""Of bfloat16."""


def as_on_tpu(module: bytes) -> bytes:
    """Rewrite the products of float32 in a serialised HloModuleProto; return `module` itself if it has none.

    The operands are rounded, and stay float32: a product of two bfloat16 is exact in float32.
    """
    parsed = hlo.parse_module(module)
    types = {
        instruction.id: instruction.shape.element_type
        for computation in parsed.computations
        for instruction in computation.instructions
    }

    def rewrite_of(instruction: Instruction) -> rewrite.Rewrite | None:
        if kernels.has_program(instruction):
            return _in_kernel
        if instruction.opcode not in PRODUCTS:
            return None
        if hlo.F32 not in (types[number] for number in instruction.operand_ids[:2]):
            return None
        precision = _precision(instruction)
        if precision == _HIGH and instruction.shape.element_type != hlo.F32:
            return None
        return None if precision == _HIGHEST else partial(_in_bfloat16, precision)

    return rewrite.rewritten(module, parsed, rewrite_of)


def _precision(instruction: Instruction) -> int:
    """Return the precision of a product, which is the higher one of its operands'."""
    config = instruction.precision_config
    if config.algorithm:
        return _ALGORITHMS.get(config.algorithm, _HIGHEST)
    return max(config.operand_precision, default=_DEFAULT)


def _in_kernel(replacement: rewrite.Replacement) -> None:
    """Rewrite the products of the program that a kernel carries."""
    original = replacement.original
    changed = replacement.add_copy("kernel", original.shape, original.operand_ids)
    program = as_on_tpu(kernels.program_of(original))
    changed.backend_config = kernels.with_program(original.backend_config.decode(), program).encode()
    changed.id, changed.name = original.id, original.name


def _in_bfloat16(precision: int, replacement: rewrite.Replacement) -> None:
    original = replacement.original
    given = original.operand_ids[:2]
    high = [_rounded(replacement, operand, replacement.shape_of(operand)) for operand in given]
    small: list[int] = []
    for position, operand in enumerate(given if precision == _HIGH else ()):
        if high[position] != operand:
            shape = replacement.shape_of(operand)
            rest = replacement.add("subtract", shape, [operand, high[position]]).id
            pair = [*high]
            pair[position] = _rounded(replacement, rest, shape)
            small.append(_product(replacement, pair).id)
    last = _product(replacement, high)
    if small:
        # The small products are added first: one after the other, the large one might lose each.
        total = small[0]
        for number in small[1:]:
            total = replacement.add("add", original.shape, [total, number]).id
        last = replacement.add("add", original.shape, [_finite(replacement, total), last.id])
    last.id, last.name = original.id, original.name
    if original.HasField("sharding"):
        last.sharding.CopyFrom(original.sharding)


def _product(replacement: rewrite.Replacement, operands: list[int]) -> Instruction:
    """Add the original product with two other operands, which the compiler must not round again."""
    original = replacement.original
    made = replacement.add_copy("product", original.shape, [*operands, *original.operand_ids[2:]])
    made.precision_config.operand_precision[:] = [_HIGHEST, _HIGHEST]
    made.precision_config.algorithm = 0
    return made


def _finite(replacement: rewrite.Replacement, operand: int) -> int:
    """Add 0 in place of what is not finite: where an operand is infinite, what is left of it is NaN."""
    shape = replacement.original.shape
    zero, mask = Shape(element_type=shape.element_type), Shape()
    # XLA rejects a constant without a layout, even a scalar.
    zero.layout.SetInParent()
    mask.CopyFrom(shape)
    mask.element_type = hlo.PRED
    constant = replacement.add("constant", zero, [])
    constant.literal.shape.CopyFrom(zero)
    constant.literal.f32s[:] = [0]
    zeros = replacement.add("broadcast", shape, [constant.id]).id
    is_finite = replacement.add("is-finite", mask, [operand]).id
    return replacement.add("select", shape, [is_finite, operand, zeros]).id


def _rounded(replacement: rewrite.Replacement, operand: int, shape: Shape) -> int:
    """Add what rounds an operand to bfloat16; return the operand itself if it is not float32."""
    if shape.element_type != hlo.F32:
        return operand
    # The compiler may leave out a conversion to bfloat16 and back, but not this.
    made = replacement.add("reduce-precision", shape, [operand])
    made.exponent_bits, made.mantissa_bits = _EXPONENT_BITS, _MANTISSA_BITS
    return made.id
