"""The parts of XLA's protocol buffers that are read here, as a minimal schema.

Fields that are not declared survive reading and writing, so a module can be changed without knowing
all of it.

Source: field numbers of xla/service/hlo.proto and xla/xla_data.proto, as of jaxlib 0.10.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError

_Field = descriptor_pb2.FieldDescriptorProto

_SCHEMA: dict[str, list[tuple[str, int, Any, bool]]] = {
    # name: [(field, number, a scalar type or the name of a message, repeated)]
    "Shape": [
        ("element_type", 2, _Field.TYPE_INT32, False),
        ("dimensions", 3, _Field.TYPE_INT64, True),
        ("tuple_shapes", 4, "Shape", True),
        ("is_dynamic_dimension", 6, _Field.TYPE_BOOL, True),
    ],
    "ProgramShape": [("parameters", 1, "Shape", True), ("result", 2, "Shape", False)],
    "Instruction": [
        ("name", 1, _Field.TYPE_STRING, False),
        ("opcode", 2, _Field.TYPE_STRING, False),
        ("shape", 3, "Shape", False),
        ("metadata", 7, _Field.TYPE_BYTES, False),
        ("channel_id", 26, _Field.TYPE_INT64, False),
        ("id", 35, _Field.TYPE_INT64, False),
        ("operand_ids", 36, _Field.TYPE_INT64, True),
    ],
    "Computation": [("instructions", 2, "Instruction", True)],
    "Alias": [("parameter_number", 2, _Field.TYPE_INT64, False)],
    "Aliases": [("entries", 1, "Alias", True)],
    "Module": [
        ("name", 1, _Field.TYPE_STRING, False),
        ("computations", 3, "Computation", True),
        ("host_program_shape", 4, "ProgramShape", False),
        ("input_output_alias", 8, "Aliases", False),
    ],
    "Config": [("entry_computation_layout", 1, "ProgramShape", False)],
    "ModuleWithConfig": [("hlo_module", 1, "Module", False), ("config", 2, "Config", False)],
}

# Source: PrimitiveType in xla_data.proto.
_PRIMITIVES = {
    1: "bool",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "uint8",
    7: "uint16",
    8: "uint32",
    9: "uint64",
    10: "float16",
    11: "float32",
    12: "float64",
    15: "complex64",
    16: "bfloat16",
    17: "token",
    18: "complex128",
    19: "float8_e5m2",
    20: "float8_e4m3fn",
    21: "int4",
    22: "uint4",
    23: "float8_e4m3b11fnuz",
    24: "float8_e5m2fnuz",
    25: "float8_e4m3fnuz",
    26: "int2",
    27: "uint2",
    28: "float8_e4m3",
    29: "float8_e3m4",
    32: "float4_e2m1fn",
    33: "float8_e8m0fnu",
}

_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
"""What waits for other replicas. Source: HloOpcode in xla/hlo/ir/hlo_opcode.h."""


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="polyxla_hlo.proto", package="polyxla_hlo", syntax="proto2"
    )
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            added = message.field.add(name=field, number=number)
            added.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
            if isinstance(kind, str):
                added.type, added.type_name = _Field.TYPE_MESSAGE, f".polyxla_hlo.{kind}"
            else:
                added.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"polyxla_hlo.{name}"))
        for name in _SCHEMA
    }


_MESSAGES = _messages()


def module_name(hlo: bytes) -> str:
    """Return the name of a serialised HloModuleProto."""
    name: str = _parsed("Module", hlo).name
    return name


def results(hlo: bytes) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtype and sizes of each result of a serialised HloModuleProto.

    Raises:
        PjrtError: a size is not known before the program runs.
    """
    module = _parsed("Module", hlo)
    shape = module.host_program_shape.result
    # A tuple is flat here: torch_xla makes no nested ones.
    parts = shape.tuple_shapes if shape.element_type not in _PRIMITIVES else [shape]
    for part in (*parts, *module.host_program_shape.parameters):
        if any(part.is_dynamic_dimension):
            raise PjrtError(
                Code.UNIMPLEMENTED,
                f"{module.name} has an array whose size {tuple(part.dimensions)} is only a limit: dynamic "
                "shapes are not supported; give it a fixed shape, by padding or by a mask",
            )
    return [(_PRIMITIVES[part.element_type], tuple(part.dimensions)) for part in parts]


def donated(hlo: bytes) -> frozenset[int]:
    """Return the numbers of the parameters whose memory the results take over."""
    return frozenset(one.parameter_number for one in _parsed("Module", hlo).input_output_alias.entries)


def collectives(hlo: bytes) -> tuple[str, ...]:
    """Return the kinds of collectives in a serialised HloModuleProto, each once."""
    found = {
        instruction.opcode.removesuffix("-start")
        for computation in _parsed("Module", hlo).computations
        for instruction in computation.instructions
    }
    return tuple(kind for kind in _COLLECTIVES if kind in found)


def for_stablehlo(hlo: bytes) -> bytes:
    """Return the module with what jaxlib cannot convert to StableHLO said in another way.

    A reduce-scatter of several operands, which ``xm.reduce_scatter`` of a list sends, becomes one for
    each: StableHLO's has a single operand. Each has a channel of its own, or the runtime would take them
    for one another. An all-to-all of one part, which goes nowhere, becomes that part: jaxlib 0.10.2 ends
    the process over it. The original instruction becomes the tuple of the results, so that whatever
    refers to it need not change.
    """
    module = _parsed("Module", hlo)
    every = [one for computation in module.computations for one in computation.instructions]
    if not any(_is_variadic_scatter(one) or _is_lonely_exchange(one) for one in every):
        return hlo
    channels = itertools.count(max(one.channel_id for one in every) + 1)
    # The upper half of an id may say which computation it is in: only the lower half is counted on.
    lower = itertools.count(max(one.id % 2**32 for one in every) + 1)
    for computation in module.computations:
        instructions = list(computation.instructions)
        del computation.instructions[:]
        for one in instructions:
            if _is_variadic_scatter(one):
                singles = _singles(one, channels, lower)
                computation.instructions.extend([*singles, _tuple(one, [single.id for single in singles])])
            elif _is_lonely_exchange(one):
                computation.instructions.append(_tuple(one, one.operand_ids))
            else:
                computation.instructions.append(one)
    data: bytes = module.SerializeToString()
    return data


def _is_variadic_scatter(instruction: Any) -> bool:
    return instruction.opcode == "reduce-scatter" and len(instruction.operand_ids) > 1


def _is_lonely_exchange(instruction: Any) -> bool:
    return instruction.opcode == "all-to-all" and len(instruction.shape.tuple_shapes) == 1


def _singles(one: Any, channels: Iterator[int], lower: Iterator[int]) -> list[Any]:
    singles = []
    for index, operand in enumerate(one.operand_ids):
        single = _MESSAGES["Instruction"]()
        single.CopyFrom(one)
        single.name = f"{one.name}.part{index}"
        single.shape.CopyFrom(one.shape.tuple_shapes[index])
        single.id = one.id // 2**32 * 2**32 + next(lower)
        single.operand_ids[:] = [operand]
        if one.channel_id:
            single.channel_id = next(channels)
        singles.append(single)
    return singles


def _tuple(one: Any, operands: Sequence[int]) -> Any:
    parts = _MESSAGES["Instruction"](name=one.name, opcode="tuple", id=one.id, metadata=one.metadata)
    parts.shape.CopyFrom(one.shape)
    parts.operand_ids[:] = operands
    return parts


def with_config(hlo: bytes) -> bytes:
    """Return a serialised HloModuleProtoWithConfig whose entry layout is the program's own shape.

    torch_xla reads result layouts from there, and ends the process where there is none.
    """
    whole = _MESSAGES["ModuleWithConfig"]()
    whole.hlo_module.MergeFromString(hlo)
    whole.config.entry_computation_layout.CopyFrom(whole.hlo_module.host_program_shape)
    data: bytes = whole.SerializeToString()
    return data


def _parsed(name: str, data: bytes) -> Any:
    message = _MESSAGES[name]()
    message.ParseFromString(data)
    return message
