"""Replaces instructions by those of functions of jax. Importing this module imports jax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib import _jax

from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.hlo_pb2 import HloComputationProto as Computation
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction
from polyxla_bridge.programs.hlo_pb2 import HloModuleProto as Module

Function = Callable[..., Any]


@dataclass(frozen=True)
class Program:
    """What a choice may look at.

    Attributes:
        computations: by id.
        instructions: of all computations, by id.
    """

    computations: Mapping[int, Computation]
    instructions: Mapping[int, Instruction]


Choice = Callable[[Instruction, Program], Function | Module | None]
"""Returns the function or program that computes an instruction from its operands; None if the instruction
stays."""


def replace(module: bytes, *choices: Choice) -> bytes:
    """Replace instructions of a serialised HloModuleProto.

    Args:
        module: the program.
        choices: called with each instruction; the first choice that returns something decides.

    Returns:
        The program; `module` itself if nothing was replaced.

    Raises:
        PjrtError: a program takes operands of other dtypes or numbers of dimensions than the instruction has.
    """
    parsed = hlo.parse_module(module)
    every = [instruction for computation in parsed.computations for instruction in computation.instructions]
    program = Program(
        {computation.id: computation for computation in parsed.computations},
        {instruction.id: instruction for instruction in every},
    )
    chosen: dict[int, Function | Module] = {}
    for instruction in every:
        found = (choose(instruction, program) for choose in choices)
        if (first := next((choice for choice in found if choice is not None), None)) is not None:
            chosen[instruction.id] = first
    if not chosen:
        return module
    shapes = {instruction.id: instruction.shape for instruction in every}
    imported = _Imported(parsed)
    for computation in list(parsed.computations):
        instructions = list(computation.instructions)
        del computation.instructions[:]
        for instruction in instructions:
            if (choice := chosen.get(instruction.id)) is not None:
                operands = [hlo.array_type(shapes[id_]) for id_ in instruction.operand_ids]
                simple = choice if isinstance(choice, Module) else lowered(choice, operands)
                computation.instructions.extend(imported.fitting(simple, operands, instruction))
                computation.instructions.extend(imported.inlined(simple, instruction))
            else:
                computation.instructions.append(instruction)
    imported.add_computations()
    return parsed.SerializeToString()


def lowered(function: Function, operands: Sequence[tuple[str, tuple[int, ...]]]) -> Module:
    """Return a function of arrays as a program."""
    return hlo.parse_module(_serialized(function, tuple(operands)))


@functools.lru_cache(maxsize=256)
def _serialized(function: Function, operands: tuple[tuple[str, tuple[int, ...]], ...]) -> bytes:
    # Layers of a network have equal convolutions, and equal functions for them.
    arrays = [jax.ShapeDtypeStruct(dims, dtype) for dtype, dims in operands]  # type: ignore[no-untyped-call]
    # jax would leave out an unused argument, and the other arguments would get its number.
    jitted = jax.jit(function, keep_unused=True)
    # Without int64, jax would write its instructions as int32.
    with jax.enable_x64(True), jax.default_device(_device()):
        lowered = jitted.lower(*arrays)
    computation: Any = lowered.compiler_ir("hlo")
    data: bytes = computation.as_serialized_hlo_module_proto()
    return data


def _fit(wanted: tuple[int, ...], array: jax.Array) -> jax.Array:
    """Return an array of another shape, without what is too much, and with NaN or zeros where it ends."""
    part = array[tuple(slice(size) for size in wanted)]
    fill = jnp.nan if jnp.issubdtype(array.dtype, jnp.inexact) else 0
    ends = [(0, size - has) for size, has in zip(wanted, part.shape, strict=True)]
    return jnp.pad(part, ends, constant_values=fill)


@functools.cache
def _device() -> jax.Device:
    """Return a device that jax lowers for, and does not own.

    Without one, jax would open all devices that it finds. It would take a GPU's memory from the plugin, and
    its user could no longer choose its platform.
    """
    device: jax.Device = _jax.get_tfrt_cpu_client(asynchronous=False, num_devices=1).devices()[0]
    return device


class _Imported:
    """Adds instructions of other programs to a module.

    Args:
        into: the module.
    """

    def __init__(self, into: Module) -> None:
        self._into = into
        self._numbers = hlo.unused_ids(into)
        self._computation_numbers = hlo.unused_computation_ids(into)
        self._called: list[Computation] = []

    def fitting(
        self, module: Module, operands: list[tuple[str, tuple[int, ...]]], original: Instruction
    ) -> Iterator[Instruction]:
        """Yield the instructions that make a program's arguments of an instruction's operands.

        A TPU's kernel finds its blocks in the arrays that it gets, whatever their sizes were when it was
        traced: torch_xla passes its kernel of a gradient fewer columns.

        Raises:
            PjrtError: an operand has another dtype, or another number of dimensions.
        """
        needed = [hlo.array_type(shape) for shape in module.host_program_shape.parameters]
        for number, (given, wanted) in enumerate(zip(operands, needed, strict=True)):
            if (given[0], len(given[1])) != (wanted[0], len(wanted[1])):
                raise PjrtError(
                    Code.INVALID_ARGUMENT,
                    f"operand {number} of {original.name} ({original.custom_call_target}) is "
                    f"{given[0]}{list(given[1])}, and was {wanted[0]}{list(wanted[1])} when it was traced",
                )
            if given != wanted:
                fitted = Instruction(id=next(self._numbers), operand_ids=[original.operand_ids[number]])
                yield from self.inlined(lowered(functools.partial(_fit, wanted[1]), [given]), fitted)
                original.operand_ids[number] = fitted.id

    def inlined(self, module: Module, original: Instruction) -> list[Instruction]:
        """Return the entry's instructions, which take the place of one that has the same operands."""
        computations = {
            computation.id: next(self._computation_numbers) for computation in module.computations
        }
        entry = hlo.entry_of(module)
        for computation in module.computations:
            if computation is not entry:
                computation.id = computations[computation.id]
                computation.name = f"{computation.name}.{computation.id}"
                numbers = {instruction.id: next(self._numbers) for instruction in computation.instructions}
                computation.root_id = numbers[computation.root_id]
                for instruction in computation.instructions:
                    _renumber(instruction, numbers, computations)
                    # The instruction's own metadata would name lines of another module.
                    instruction.metadata = original.metadata
                self._called.append(computation)
        # The operands of the original replace the parameters, and the root gets the id of the original, so
        # the users of the original need no change.
        given = {
            instruction.id: original.operand_ids[instruction.parameter_number]
            for instruction in entry.instructions
            if instruction.opcode == "parameter"
        }
        body = [instruction for instruction in entry.instructions if instruction.id not in given]
        numbers = (
            given
            | {instruction.id: next(self._numbers) for instruction in body}
            | {entry.root_id: original.id}
        )
        for instruction in body:
            _renumber(instruction, numbers, computations)
            instruction.metadata = original.metadata
        # The partitioner must find the sharding of the original on what replaces it.
        if original.HasField("sharding"):
            (root,) = (instruction for instruction in body if instruction.id == original.id)
            root.sharding.CopyFrom(original.sharding)
        return body

    def add_computations(self) -> None:
        """Add what the inlined instructions call."""
        hlo.add_called(self._into, self._called)


def _renumber(instruction: Instruction, numbers: dict[int, int], computations: dict[int, int]) -> None:
    instruction.id = numbers[instruction.id]
    instruction.name = f"{instruction.name}.{instruction.id}"
    instruction.operand_ids[:] = [numbers[id_] for id_ in instruction.operand_ids]
    instruction.called_computation_ids[:] = [computations[id_] for id_ in instruction.called_computation_ids]
