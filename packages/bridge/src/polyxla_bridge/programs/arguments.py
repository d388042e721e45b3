"""Rewriting of how a program takes its arguments and gives its results, for a newer XLA than torch_xla's."""

from __future__ import annotations

from typing import Any

from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.hlo_pb2 import HloComputationProto as Computation
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction
from polyxla_bridge.programs.hlo_pb2 import HloModuleProto as Module
from polyxla_bridge.programs.hlo_pb2 import ShapeProto as Shape

MAY_ALIAS = 1
"""The kind of an alias whose argument is copied if it must not be overwritten.

Source: Kind in xla/service/hlo.proto.
"""


TUPLE_SHARDING = 2
"""The type of the sharding of a tuple, which has one for each element.

Source: Type of OpSharding in xla/xla_data.proto.
"""


def for_jaxlib(module: bytes, *, is_partitioned: bool) -> bytes:
    """Rewrite a serialised HloModuleProto for jaxlib.

    - A tuple of all arguments becomes one parameter for each. torch_xla packs 3200 arguments and more, and
      writes a layout for the tuple, which jaxlib refuses.
    - An argument that may be overwritten (a buffer donor) is paired with a result of its shape: StableHLO
      has no buffer donors. Not in a partitioned program: a device's parts of the two may differ in shape.

    Args:
        module: the program.
        is_partitioned: whether several devices compute it together.

    Returns:
        The rewritten program; `module` itself if nothing had to change.
    """
    parsed = hlo.parse_module(module)
    # A donor may be an element of the tuple, so the tuple is unpacked first.
    is_changed = _unpack(parsed)
    if not is_partitioned:
        is_changed = _pair_donors(parsed) or is_changed
    return parsed.SerializeToString() if is_changed else module


def keep_result_shardings(module: bytes) -> tuple[bytes, list[bool]]:
    """Make the shardings that a user gave to results binding, in a partitioned program.

    torch_xla lets XLA choose the sharding of every result. A newer XLA than torch_xla's then replaces one
    that the user gave, if the argument has another: a `redistribute` would have no effect.

    Args:
        module: a serialised HloModuleProto.

    Returns:
        The program, and for each result whether XLA may choose its sharding; `module` itself and nothing if
        it may choose that of all.
    """
    parsed = hlo.parse_module(module)
    entry = hlo.entry_of(parsed)
    instructions = {instruction.id: instruction for instruction in entry.instructions}
    root = instructions[entry.root_id]
    # The sharding of a root is what a user asked for, as JAX writes it.
    if root.opcode != "tuple" or root.HasField("sharding"):
        return module, []
    results = [instructions[id_] for id_ in root.operand_ids]
    may_choose = [result.custom_call_target != "Sharding" for result in results]
    if all(may_choose):
        return module, []
    root.sharding.type = TUPLE_SHARDING
    for result, is_free in zip(results, may_choose, strict=True):
        element = root.sharding.tuple_shardings.add()
        if not is_free:
            element.CopyFrom(result.sharding)
    return parsed.SerializeToString(), may_choose


def _unpack(parsed: Module) -> bool:
    """Turn the elements of the only parameter, a tuple, into parameters; return whether there was one."""
    shapes = parsed.host_program_shape.parameters
    if len(shapes) != 1 or shapes[0].element_type != hlo.TUPLE:
        return False
    entry = hlo.entry_of(parsed)
    (packed,) = (instruction for instruction in entry.instructions if instruction.opcode == "parameter")
    elements = [instruction for instruction in entry.instructions if packed.id in instruction.operand_ids]
    # The instruction that takes an element becomes its parameter, so each element must be taken exactly once.
    if sorted(instruction.tuple_index for instruction in elements) != list(
        range(len(shapes[0].tuple_shapes))
    ):
        return False
    for element in elements:
        _make_parameter(element, packed)
    kept = [instruction for instruction in entry.instructions if instruction.id != packed.id]
    del entry.instructions[:]
    entry.instructions.extend(kept)
    _set_parameters(parsed, entry, sorted(elements, key=lambda element: element.parameter_number))
    # What named an element, by the tuple's number and the element's index, now names a parameter.
    given_up: list[Any] = [*parsed.buffer_donor.entries, *parsed.input_output_alias.entries]
    for given in given_up:
        (given.parameter_number,) = given.parameter_shape_index
        del given.parameter_shape_index[:]
    return True


def _make_parameter(element: Instruction, packed: Instruction) -> None:
    """Turn an instruction that takes an element of the tuple into a parameter."""
    element.opcode, element.parameter_number = "parameter", element.tuple_index
    if packed.sharding.tuple_shardings:
        element.sharding.CopyFrom(packed.sharding.tuple_shardings[element.tuple_index])
    element.ClearField("tuple_index")
    del element.operand_ids[:]


def _set_parameters(parsed: Module, entry: Computation, parameters: list[Instruction]) -> None:
    for shape in (parsed.host_program_shape, entry.program_shape):
        del shape.parameters[:]
        shape.parameters.extend(parameter.shape for parameter in parameters)
        shape.parameter_names[:] = [parameter.name for parameter in parameters]


def _pair_donors(parsed: Module) -> bool:
    """Let each donor's memory become that of a result; return whether there is such a pair.

    Source: the idea is that of XLA's pass OptimizeInputOutputBufferAlias.
    """
    parameters, entries = parsed.host_program_shape.parameters, parsed.input_output_alias.entries
    taken = [tuple(entry.output_shape_index) for entry in entries]
    free = {index: shape for index, shape in _results(parsed).items() if index not in taken}
    # A parameter's memory can become that of one result only. The framework may have chosen it already.
    paired = {entry.parameter_number for entry in entries}
    for number in [entry.parameter_number for entry in parsed.buffer_donor.entries]:
        fits = [index for index, shape in free.items() if hlo.is_same_array(parameters[number], shape)]
        if fits and number not in paired:
            del free[fits[0]]
            entries.add(output_shape_index=fits[0], parameter_number=number, kind=MAY_ALIAS)
    return len(entries) > len(taken)


def _results(parsed: Module) -> dict[tuple[int, ...], Shape]:
    """Return the shape of each result by its index in StableHLO, where a single result is not a tuple."""
    result = parsed.host_program_shape.result
    shapes = result.tuple_shapes or [result]
    return {(i,) if len(shapes) > 1 else (): shape for i, shape in enumerate(shapes)}
