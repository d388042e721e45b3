"""Instructions replaced by what a function of jax computes. Importing this module imports jax."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.hlo_pb2 import HloComputationProto as Computation
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction
from polyxla_bridge.programs.hlo_pb2 import HloModuleProto as Module

Function = Callable[..., Any]
Choice = Callable[[Instruction, Mapping[int, Computation]], Function | None]
"""Returns what computes an instruction from its operands; None for one that stays."""


def replace(module: bytes, *choices: Choice) -> bytes:
    """Replace instructions of a serialised HloModuleProto.

    Args:
        module: the program.
        choices: called with each instruction, and the computations by their ids; the first function counts.

    Returns:
        The program; `module` itself if nothing was replaced.
    """
    parsed = hlo.parse_module(module)
    computations = {one.id: one for one in parsed.computations}
    every = [one for computation in parsed.computations for one in computation.instructions]
    functions: dict[int, Function] = {}
    for one in every:
        found = filter(None, (choose(one, computations) for choose in choices))
        if (function := next(found, None)) is not None:
            functions[one.id] = function
    if not functions:
        return module
    shapes = {one.id: one.shape for one in every}
    imported = _Imported(parsed)
    for computation in list(parsed.computations):
        instructions = list(computation.instructions)
        del computation.instructions[:]
        for one in instructions:
            if one.id in functions:
                operands = [hlo.array_type(shapes[id_]) for id_ in one.operand_ids]
                computation.instructions.extend(imported.inlined(_lowered(functions[one.id], operands), one))
            else:
                computation.instructions.append(one)
    imported.add_computations()
    return parsed.SerializeToString()


def _lowered(function: Function, operands: list[tuple[str, tuple[int, ...]]]) -> Module:
    """Return a function of arrays as a program."""
    arrays = [jax.ShapeDtypeStruct(dims, dtype) for dtype, dims in operands]  # type: ignore[no-untyped-call]
    # An unused argument would be left out of the program.
    lowered = jax.jit(function, keep_unused=True).lower(*arrays)
    computation: Any = lowered.compiler_ir("hlo")
    return hlo.parse_module(computation.as_serialized_hlo_module_proto())


class _Imported:
    """Instructions of other programs, for a module.

    Args:
        into: the module.
    """

    def __init__(self, into: Module) -> None:
        self._into = into
        every = [one for computation in into.computations for one in computation.instructions]
        self._numbers = itertools.count(max(one.id for one in every) + 1)
        self._computation_numbers = itertools.count(max(one.id for one in into.computations) + 1)
        self._called: list[Computation] = []

    def inlined(self, module: Module, original: Instruction) -> list[Instruction]:
        """Return the entry's instructions, which take the place of one that has the same operands."""
        computations = {one.id: next(self._computation_numbers) for one in module.computations}
        (entry,) = (one for one in module.computations if one.id == module.entry_computation_id)
        for computation in module.computations:
            if computation is not entry:
                computation.id = computations[computation.id]
                computation.name = f"{computation.name}.{computation.id}"
                numbers = {one.id: next(self._numbers) for one in computation.instructions}
                computation.root_id = numbers[computation.root_id]
                for one in computation.instructions:
                    _renumber(one, numbers, computations)
                    # Its own would name lines of another module.
                    one.metadata = original.metadata
                self._called.append(computation)
        given = {
            one.id: original.operand_ids[one.parameter_number]
            for one in entry.instructions
            if one.opcode == "parameter"
        }
        body = [one for one in entry.instructions if one.id not in given]
        numbers = given | {one.id: next(self._numbers) for one in body} | {entry.root_id: original.id}
        for one in body:
            _renumber(one, numbers, computations)
            one.metadata = original.metadata
        if original.HasField("sharding"):
            (root,) = (one for one in body if one.id == original.id)
            root.sharding.CopyFrom(original.sharding)
        return body

    def add_computations(self) -> None:
        """Add what the inlined instructions call; the module's entry stays its last computation."""
        before = list(self._into.computations)
        del self._into.computations[:]
        self._into.computations.extend([*self._called, *before])


def _renumber(one: Instruction, numbers: dict[int, int], computations: dict[int, int]) -> None:
    one.id = numbers[one.id]
    one.name = f"{one.name}.{one.id}"
    one.operand_ids[:] = [numbers[id_] for id_ in one.operand_ids]
    one.called_computation_ids[:] = [computations[id_] for id_ in one.called_computation_ids]
