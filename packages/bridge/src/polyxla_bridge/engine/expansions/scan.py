"""Scans, which TorchTPU uses for ``cumsum`` and similar functions. Importing this module imports jax.

XLA:CPU does not compile them: jaxlib 0.10.2 refuses some, and ends the process over others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax

from polyxla_bridge.abi import Code
from polyxla_bridge.engine.expansions import inlining
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.hlo_pb2 import HloComputationProto as Computation
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction

_YES = 1
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "EQ": lax.eq,
    "NE": lax.ne,
    "GE": lax.ge,
    "GT": lax.gt,
    "LE": lax.le,
    "LT": lax.lt,
}
_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "abs": lax.abs,
    "add": lax.add,
    "and": lax.bitwise_and,
    "divide": lax.div,
    "exponential": lax.exp,
    "exponential-minus-one": lax.expm1,
    "is-finite": lax.is_finite,
    "log": lax.log,
    "log-plus-one": lax.log1p,
    "maximum": lax.max,
    "minimum": lax.min,
    "multiply": lax.mul,
    "negate": lax.neg,
    "not": lax.bitwise_not,
    "or": lax.bitwise_or,
    "select": lax.select,
    "subtract": lax.sub,
    "xor": lax.bitwise_xor,
}
"""Operations that a step of a scan may apply to its elements."""


def choose(instruction: Instruction, program: inlining.Program) -> inlining.Function | None:
    """Return the function that computes a scan; None for any other instruction.

    Raises:
        PjrtError: a step has an instruction that is not known here.
    """
    if instruction.opcode != "scan":
        return None
    (called,) = instruction.called_computation_ids
    step = _Step(program.computations[called], instruction.num_carries)
    # A parallel scan computes only the carries, so the results must be the same.
    scan = _in_parallel if instruction.is_associative == _YES and step.has_equal_results else _in_order
    return partial(
        scan,
        step,
        instruction.dimensions[0],
        instruction.is_reverse,
        len(instruction.operand_ids) - instruction.num_carries,
    )


class _Step:
    """One step of a scan, which takes elements and carries, and returns results and new carries.

    Args:
        computation: the step.
        carries: number of the carries.
    """

    def __init__(self, computation: Computation, carries: int) -> None:
        self._instructions = computation.instructions
        self._carries = carries
        (self._root,) = (
            instruction for instruction in self._instructions if instruction.id == computation.root_id
        )
        # Refuse the step when the program is compiled, where the error can name the operation.
        for instruction in self._instructions:
            if instruction.opcode not in {"parameter", "tuple", "compare", *_ELEMENTWISE}:
                raise PjrtError(
                    Code.UNIMPLEMENTED,
                    f"a scan with the operation {instruction.opcode} is not supported on emulated devices; "
                    "compute it on the CPU, with .cpu()",
                )

    @property
    def has_equal_results(self) -> bool:
        """Whether the results of a step are its carries."""
        ids = list(self._root.operand_ids)
        return self._root.opcode == "tuple" and ids[: -self._carries] == ids[-self._carries :]

    def __call__(self, elements: Sequence[Any], carries: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the results and the new carries."""
        given = (*elements, *carries)
        values: dict[int, Any] = {}
        for instruction in self._instructions:
            operands = [values.get(id_) for id_ in instruction.operand_ids]
            if instruction.opcode == "parameter":
                values[instruction.id] = given[instruction.parameter_number]
            elif instruction.opcode == "compare":
                values[instruction.id] = _COMPARISONS[instruction.comparison_direction](*operands)
            elif instruction.opcode != "tuple":
                values[instruction.id] = _ELEMENTWISE[instruction.opcode](*operands)
        found = [values[id_] for id_ in self._root.operand_ids]
        return found[: -self._carries], found[-self._carries :]


def _in_parallel(step: _Step, axis: int, is_reverse: bool, inputs: int, *operands: jax.Array) -> Any:
    """Combine neighbouring elements, then neighbouring pairs, and so on, in log2(elements) rounds."""

    def combine(earlier: Sequence[Any], later: Sequence[Any]) -> list[Any]:
        # A step takes its elements first, then the carries, which come from earlier steps.
        return step(later, earlier)[1]

    # The initial carries join at the end: an associative step may combine its elements first.
    elements, initial = list(operands[:inputs]), operands[inputs:]
    found = lax.associative_scan(combine, elements, reverse=is_reverse, axis=axis)
    kept = [dim for dim in range(elements[0].ndim) if dim != axis]
    whole = [
        lax.broadcast_in_dim(first, part.shape, kept) for first, part in zip(initial, elements, strict=True)
    ]
    results = step(found, whole)[1]
    last = 0 if is_reverse else elements[0].shape[axis] - 1
    return (*results, *(lax.index_in_dim(result, last, axis, keepdims=False) for result in results))


def _in_order(step: _Step, axis: int, is_reverse: bool, inputs: int, *operands: jax.Array) -> Any:
    moved = [jax.numpy.moveaxis(operand, axis, 0) for operand in operands[:inputs]]

    def body(carries: list[Any], elements: list[Any]) -> tuple[list[Any], list[Any]]:
        results, after = step(elements, carries)
        return after, results

    carries, results = lax.scan(body, list(operands[inputs:]), moved, reverse=is_reverse)
    return (*(jax.numpy.moveaxis(result, 0, axis) for result in results), *carries)
