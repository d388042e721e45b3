"""One program in the place of several that differ between replicas.

torch_xla writes what depends on a replica's ordinal into its program: as the width of a pad, or as a number,
which is a constant if it is 0 or 1 and a parameter otherwise. So the programs of replicas that meet in a
collective differ.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import agreement, hlo
from polyxla_bridge.programs.hlo_pb2 import HloComputationProto as Computation
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction
from polyxla_bridge.programs.hlo_pb2 import HloModuleProto as Module
from polyxla_bridge.programs.hlo_pb2 import ShapeProto as Shape

U32 = 8
"""Element type of unsigned integers of 32 bits. Source: PrimitiveType in xla_data.proto."""
STATEFUL = ("custom-call", "infeed", "outfeed", "recv", "rng", "rng-get-and-update-state", "send")
"""Instructions that are never shared, because two with the same operands do different things. Nor is what
calls one."""


@dataclass(frozen=True)
class MergedProgram:
    """The result of `merged`.

    Attributes:
        module: a serialised HloModuleProto.
        arguments: for each replica, and for each argument of this program, the index of the argument in the
            replica's own program; None if the replica does not need it.
    """

    module: bytes
    arguments: tuple[tuple[int | None, ...], ...]


def merged(modules: Sequence[bytes]) -> MergedProgram:
    """Return a program that does on each replica what that replica's program does.

    It has the instructions of all programs; an instruction that is the same in several appears once. Where
    the programs meet, in a collective or what calls one, and for the results, the replica's number selects
    whose values count.

    Args:
        modules: a serialised HloModuleProto for each replica.

    Raises:
        PjrtError: the programs do not have the same collectives, or results of the same shapes.
    """
    programs = [hlo.parse_module(module) for module in modules]
    into = _Merging(programs)
    sources = [_Source(program, into) for program in programs]
    # A collective has to be added once for all programs, so none may advance beyond it before the others.
    while True:
        for source in sources:
            source.advance()
        if not any(source.next for source in sources):
            return into.finish(sources)
        into.add_meeting(sources)


class _Source:
    """The instructions of one program, which are added up to the next meeting with the others.

    Args:
        program: its module.
        into: where they are added.
    """

    def __init__(self, program: Module, into: _Merging) -> None:
        self.slots: dict[int, int] = into.add_parameters(program)
        self._into = into
        self._numbers: dict[int, int] = {}
        self._called = into.add_computations(program)
        self._meeting = hlo.computations_with(program, hlo.is_collective)
        self._stateful = hlo.computations_with(program, lambda each: each.opcode in STATEFUL)
        entry = hlo.entry_of(program)
        # The root is a meeting too, wherever it is in the list: the results must be selected together.
        self.root_id = entry.root_id
        self._left = list(reversed(entry.instructions))

    @property
    def next(self) -> Instruction | None:
        """The program's instruction at the next meeting; None if it has none."""
        return self._left[-1] if self._left else None

    def advance(self) -> None:
        """Add the instructions before the next meeting."""
        while self._left and not self.meets(self._left[-1]) and self._left[-1].id != self.root_id:
            one = self._left.pop()
            self._numbers[one.id] = self.number(one)

    def meets(self, instruction: Instruction) -> bool:
        """Return whether an instruction is a collective, or has one in what it calls, as a loop's body."""
        return hlo.is_collective(instruction) or not self._meeting.isdisjoint(
            instruction.called_computation_ids
        )

    def number(self, instruction: Instruction) -> int:
        """Add an instruction, unless it is there; return its number."""
        if instruction.opcode == "parameter":
            return self._into.parameters[self.slots[instruction.parameter_number]].id
        form = self.form(instruction)
        if form.opcode in STATEFUL or not self._stateful.isdisjoint(instruction.called_computation_ids):
            return self._into.add(form).id
        return self._into.add_shared(form)

    def form(self, instruction: Instruction) -> Instruction:
        """Return an instruction with the merged program's numbers, without its own name, id and metadata."""
        # Equal instructions must have equal forms. The metadata also names stack frames by numbers that mean
        # nothing in another program.
        form = Instruction()
        form.CopyFrom(instruction)
        for name in ("name", "metadata", "id"):
            form.ClearField(name)
        form.operand_ids[:] = [self._numbers[id_] for id_ in instruction.operand_ids]
        form.called_computation_ids[:] = [self._called[id_] for id_ in instruction.called_computation_ids]
        return form

    def leave(self, number: int) -> None:
        """Leave a meeting, whose result is the instruction `number`."""
        self._numbers[self._left.pop().id] = number


class _Merging:
    """The merged program.

    Args:
        programs: the module of each replica, from the first of which it has its name.
    """

    def __init__(self, programs: Sequence[Module]) -> None:
        self.parameters: list[Instruction] = []
        self._programs = programs
        self._module = Module()
        self._module.CopyFrom(programs[0])
        # These refer to parameters and stack frames of the first program by numbers that no longer hold.
        for name in ("computations", "input_output_alias", "buffer_donor", "stack_frame_index"):
            self._module.ClearField(name)
        self._entry = Computation(name="main")
        self._ids = itertools.count(1)
        self._known: dict[bytes, int] = {}
        self._shapes: dict[int, Shape] = {}
        self._computations: dict[bytes, int] = {}

    def add_parameters(self, program: Module) -> dict[int, int]:
        """Return the merged program's parameter for each of a program's.

        Programs share parameters of the same shape.
        """
        # Programs have most parameters in common, in the same order, but a program may have more in between.
        # With `autojunk`, the matcher would ignore shapes that occur often among many parameters.
        mine = [_key(parameter.shape) for parameter in self.parameters]
        shapes = list(program.host_program_shape.parameters)
        matcher = difflib.SequenceMatcher(None, mine, [_key(shape) for shape in shapes], autojunk=False)
        slots = {
            block.b + offset: block.a + offset
            for block in matcher.get_matching_blocks()
            for offset in range(block.size)
        }
        for number, shape in enumerate(shapes):
            if number not in slots:
                slots[number] = len(self.parameters)
                made = Instruction(opcode="parameter", name="p", parameter_number=slots[number])
                made.shape.CopyFrom(shape)
                self.parameters.append(self.add(made))
        return slots

    def add_computations(self, program: Module) -> dict[int, int]:
        """Add what a program's instructions call; return the merged program's number of each computation."""
        # A module lists each computation after those that it calls, so their numbers are known.
        numbers: dict[int, int] = {}
        for computation in program.computations:
            if computation.id == program.entry_computation_id:
                continue
            copy = _normal(computation, numbers)
            key = copy.SerializeToString(deterministic=True)
            if key not in self._computations:
                self._computations[key] = next(self._ids)
                self._import(copy, self._computations[key])
            numbers[computation.id] = self._computations[key]
        return numbers

    def _import(self, computation: Computation, number: int) -> None:
        # The ids of instructions are unique in the module. `_normal` has set those of called computations.
        made = self._module.computations.add()
        made.CopyFrom(computation)
        made.id, made.name = number, f"called.{number}"
        ids = {instruction.id: next(self._ids) for instruction in computation.instructions}
        made.root_id = ids[computation.root_id]
        for instruction in made.instructions:
            instruction.id = ids[instruction.id]
            instruction.name = f"{instruction.opcode}.{instruction.id}"
            instruction.operand_ids[:] = [ids[id_] for id_ in instruction.operand_ids]

    def add_shared(self, form: Instruction) -> int:
        """Add an instruction, unless there is one that computes the same; return its number."""
        key = form.SerializeToString(deterministic=True)
        if key not in self._known:
            self._known[key] = self.add(form).id
        return self._known[key]

    def add(self, instruction: Instruction) -> Instruction:
        """Add an instruction, even if there is one that computes the same; return it with its number."""
        instruction.id = next(self._ids)
        instruction.name = f"{instruction.opcode}.{instruction.id}"
        self._entry.instructions.append(instruction)
        self._shapes[instruction.id] = instruction.shape
        return instruction

    def add_meeting(self, sources: Sequence[_Source]) -> None:
        """Add what the programs do together: a collective, what calls one, or their results."""
        ones = [source.next for source in sources]
        present = [instruction for instruction in ones if instruction is not None]
        kinds = {
            (instruction.id == source.root_id, source.meets(instruction))
            for instruction, source in zip(present, sources, strict=False)
        }
        # Some programs have ended, or some are at their results while others are in a collective.
        if len(present) < len(ones) or len(kinds) > 1:
            raise self._different()
        ((is_root, meets),) = kinds
        if meets or present[0].opcode == "tuple":
            forms = [source.form(instruction) for source, instruction in zip(sources, present, strict=True)]
            number = self._add_together(forms)
        else:
            # A single result may come from different instructions, so each is added and the value selected.
            number = self._select(
                [source.number(instruction) for source, instruction in zip(sources, present, strict=True)]
            )
        for source in sources:
            source.leave(number)
        if is_root:
            self._entry.root_id = number

    def _add_together(self, forms: Sequence[Instruction]) -> int:
        """Add an instruction whose operands are, on each replica, those of the replica's own program."""
        if len({_without_operands(form) for form in forms}) > 1:
            raise self._different()
        together = Instruction()
        together.CopyFrom(forms[0])
        rows = zip(*(form.operand_ids for form in forms), strict=True)
        together.operand_ids[:] = [self._select(row) for row in rows]
        return self.add(together).id

    def _select(self, values: Sequence[int]) -> int:
        """Return the number of an instruction that has, on each replica, the value of its own program."""
        chosen = values[0]
        for replica, value in enumerate(values):
            if value != values[0]:
                chosen = self._choose(replica, value, chosen)
        return chosen

    def _choose(self, replica: int, value: int, other: int) -> int:
        shape = self._shapes[value]
        if _key(shape) != _key(self._shapes[other]):
            raise self._different()
        if shape.element_type == hlo.TUPLE:
            # A select takes no tuples.
            elements = [
                self._choose(replica, self._element(value, index), self._element(other, index))
                for index in range(len(shape.tuple_shapes))
            ]
            return self.add_shared(_made("tuple", shape, *elements))
        scalar, flag = Shape(element_type=U32), Shape(element_type=hlo.PRED)
        constant = _made("constant", scalar)
        constant.literal.shape.CopyFrom(scalar)
        # XLA refuses a literal without a layout, even a scalar's, which is empty.
        constant.literal.shape.layout.SetInParent()
        constant.literal.u32s.append(replica)
        mine = self.add_shared(_made("replica-id", scalar))
        same = _made("compare", flag, mine, self.add_shared(constant))
        same.comparison_direction = "EQ"
        # A select takes a flag for each element.
        wide = Shape()
        wide.CopyFrom(shape)
        wide.element_type = hlo.PRED
        everywhere = self.add_shared(_made("broadcast", wide, self.add_shared(same)))
        return self.add_shared(_made("select", shape, everywhere, value, other))

    def _element(self, value: int, index: int) -> int:
        element = _made("get-tuple-element", self._shapes[value].tuple_shapes[index], value)
        element.tuple_index = index
        return self.add_shared(element)

    def _different(self) -> PjrtError:
        meets = [hlo.meets(program.SerializeToString()) for program in self._programs]
        for replica, others in enumerate(meets):
            for (first, _), (second, _) in zip(meets[0], others, strict=False):
                if first != second:
                    return agreement.different(0, first, replica, second)
        names = ", ".join(sorted({program.name for program in self._programs}))
        return PjrtError(
            Code.UNIMPLEMENTED,
            f"replicas that meet in a collective run programs that are too different ({names}): on this "
            "plugin, all must have the same collectives in the same order, and results of the same shapes. "
            "Take the same steps on all replicas: no branch with a collective may depend on the ordinal",
        )

    def finish(self, sources: Sequence[_Source]) -> MergedProgram:
        """Return the program."""
        self._entry.id = next(self._ids)
        shape = self._entry.program_shape
        shape.CopyFrom(self._programs[0].host_program_shape)
        del shape.parameters[:], shape.parameter_names[:]
        shape.parameters.extend(parameter.shape for parameter in self.parameters)
        shape.parameter_names.extend(parameter.name for parameter in self.parameters)
        self._module.host_program_shape.CopyFrom(shape)
        # The entry calls the other computations, so it is the last.
        self._module.computations.append(self._entry)
        self._module.entry_computation_id = self._entry.id
        taken = [{slot: number for number, slot in source.slots.items()} for source in sources]
        every = range(len(self.parameters))
        return MergedProgram(
            self._module.SerializeToString(), tuple(tuple(map(numbers.get, every)) for numbers in taken)
        )


def _made(opcode: str, shape: Shape, *operands: int) -> Instruction:
    made = Instruction(opcode=opcode, operand_ids=operands)
    made.shape.CopyFrom(shape)
    return made


def _key(shape: Shape) -> tuple[Any, ...]:
    return (shape.element_type, *shape.dimensions, *map(_key, shape.tuple_shapes))


def _without_operands(form: Instruction) -> bytes:
    copy = Instruction()
    copy.CopyFrom(form)
    copy.ClearField("operand_ids")
    return copy.SerializeToString(deterministic=True)


def _normal(computation: Computation, called: dict[int, int]) -> Computation:
    """Return a computation with numbers that depend on its content only."""
    copy = Computation()
    copy.CopyFrom(computation)
    ids = {instruction.id: number for number, instruction in enumerate(computation.instructions)}
    copy.root_id = ids[computation.root_id]
    for instruction in copy.instructions:
        instruction.id = ids[instruction.id]
        instruction.operand_ids[:] = [ids[id_] for id_ in instruction.operand_ids]
        instruction.called_computation_ids[:] = [called[id_] for id_ in instruction.called_computation_ids]
        for name in ("name", "metadata"):
            instruction.ClearField(name)
    for name in ("name", "id"):
        copy.ClearField(name)
    shape = copy.program_shape
    del shape.parameter_names[:]
    return copy
