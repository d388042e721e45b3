"""A bound on what XLA's CPU compiler lets a program compute again.

The compiler puts cheap instructions into the loop of each of their users, which all compute them. In an LSTM,
the gradient of each step's state is computed from that of the next step, by cheap instructions only: each
step would compute it from the last step on. Code and work would grow with the square of the number of steps.
"""

from __future__ import annotations

import itertools
from collections import Counter

from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.hlo_pb2 import HloComputationProto as Computation
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction
from polyxla_bridge.programs.hlo_pb2 import HloModuleProto as Module
from polyxla_bridge.programs.hlo_pb2 import ShapeProto as Shape

LIMIT = 64
"""Most instructions that several users compute, each for itself. Convolutional networks and transformers have
less than 32 between two instructions of another kind, also in the steps of AdamW and RMSprop."""
_COMPUTED_ONCE = frozenset(
    (
        *("atan2", "cbrt", "cosine", "erf", "exponential", "exponential-minus-one", "log", "log-plus-one"),
        *("logistic", "power", "remainder", "rsqrt", "sine", "sqrt", "tan", "tanh"),
    )
)
"""Instructions that are expensive: with several users, they are computed once.
Source: ``InstructionFusion::IsExpensive`` in xla/service/instruction_fusion.cc."""
_FUSED = _COMPUTED_ONCE | frozenset(
    (
        *("abs", "add", "and", "bitcast", "bitcast-convert", "broadcast", "ceil", "clamp", "compare"),
        *("concatenate", "constant", "convert", "copy", "divide", "dynamic-slice", "floor", "iota"),
        *("maximum", "minimum", "multiply", "negate", "not", "or", "pad", "reshape", "reverse"),
        *("round-nearest-afz", "round-nearest-even", "select", "shift-left", "shift-right-arithmetic"),
        *("shift-right-logical", "sign", "slice", "subtract", "transpose", "xor"),
    )
)
"""Instructions that the compiler puts into the loops of their users.
Source: ``CanBeLoopFused`` in xla/service/cpu/cpu_instruction_fusion.cc."""
_RUN_ONCE = ("call", "conditional", "while")
"""Instructions that run what they call as a part of the program, and not for each element of an array."""


def bounded(module: bytes) -> bytes:
    """End what several users would compute by a call, which the compiler does not put into a loop.

    Args:
        module: a serialised HloModuleProto of one partition: the partitioner would not divide a call.

    Returns:
        The program; `module` itself if nothing is long enough.
    """
    parsed = hlo.parse_module(module)
    calls, applied = _Calls(parsed), _applied(parsed)
    for computation in parsed.computations:
        if len(computation.instructions) > LIMIT and computation.id not in applied:
            _bound(computation, calls)
    if not calls.called:
        return module
    hlo.add_called(parsed, calls.called.values())
    return parsed.SerializeToString()


def _applied(module: Module) -> set[int]:
    """Return the computations that run for each element of an array, such as those of a reduce or a sort.

    The compiler makes a loop of them, too, and ends the process if there is a call in one.
    """
    found: set[int] = set()
    # A module lists each computation after those that it calls.
    for computation in reversed(module.computations):
        for instruction in computation.instructions:
            if computation.id in found or instruction.opcode not in _RUN_ONCE:
                found.update(instruction.called_computation_ids)
    return found


class _Calls:
    """Makes calls that return their operand.

    Args:
        module: has the calls.

    Attributes:
        called: what they call, by the shape of the operand.
    """

    def __init__(self, module: Module) -> None:
        self._numbers = hlo.unused_ids(module)
        self._computation_numbers = hlo.unused_computation_ids(module)
        self.called: dict[bytes, Computation] = {}

    def of(self, operand: Instruction) -> Instruction:
        """Return a call with the value of an instruction."""
        key = operand.shape.SerializeToString()
        if key not in self.called:
            self.called[key] = self._copy_of(operand.shape)
        number = next(self._numbers)
        call = Instruction(id=number, name=f"computed_once.{number}", opcode="call", shape=operand.shape)
        call.operand_ids.append(operand.id)
        call.called_computation_ids.append(self.called[key].id)
        # Source: xla/service/call_inliner.cc, which would otherwise put the call's content in its place.
        call.frontend_attributes.map["inlineable"] = "false"
        return call

    def _copy_of(self, shape: Shape) -> Computation:
        numbers = [next(self._numbers) for _ in range(2)]
        given = Instruction(id=numbers[0], name=f"given.{numbers[0]}", opcode="parameter", shape=shape)
        copy = Instruction(id=numbers[1], name=f"copy.{numbers[1]}", opcode="copy", shape=shape)
        copy.operand_ids.append(given.id)
        number = next(self._computation_numbers)
        made = Computation(id=number, name=f"value.{number}", instructions=[given, copy], root_id=copy.id)
        made.program_shape.parameters.append(shape)
        made.program_shape.parameter_names.append(given.name)
        made.program_shape.result.CopyFrom(shape)
        return made


def _bound(computation: Computation, calls: _Calls) -> None:
    instructions = list(computation.instructions)
    users = Counter(number for each in instructions for number in {*each.operand_ids})
    # By the id of an instruction: what its loop computes, and the call that its users get in its place.
    loops: dict[int, frozenset[int]] = {}
    once: dict[int, int] = {}
    placed: list[Instruction] = []
    for instruction in instructions:
        instruction.operand_ids[:] = [once.get(number, number) for number in instruction.operand_ids]
        placed.append(instruction)
        if instruction.opcode not in _FUSED:
            continue
        whole = {instruction.id}.union(*(loops.get(number, ()) for number in instruction.operand_ids))
        # More would make no difference, and those of a long line would fill the memory.
        loop = frozenset(itertools.islice(whole, LIMIT))
        if users[instruction.id] < 2:
            loops[instruction.id] = loop
        elif instruction.opcode not in _COMPUTED_ONCE:
            if len(loop) < LIMIT:
                loops[instruction.id] = loop
            else:
                call = calls.of(instruction)
                once[instruction.id] = call.id
                placed.append(call)
    if once:
        del computation.instructions[:]
        computation.instructions.extend(placed)
