"""The parts of XLA's protocol buffers that are read here, as a minimal schema.

Fields that are not declared survive reading and writing, so a module can be changed without knowing
all of it.

Source: field numbers of xla/service/hlo.proto and xla/xla_data.proto, as of jaxlib 0.10.2.
"""

from __future__ import annotations

import math
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from polyxla_bridge.errors import PjrtError
from polyxla_bridge.table.abi import Code, width

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
        ("tuple_index", 13, _Field.TYPE_INT64, False),
        ("dimensions", 14, _Field.TYPE_INT64, True),
        ("slice_dimensions", 17, "Slice", True),
        ("channel_id", 26, _Field.TYPE_INT64, False),
        ("id", 35, _Field.TYPE_INT64, False),
        ("operand_ids", 36, _Field.TYPE_INT64, True),
        ("called_computation_ids", 38, _Field.TYPE_INT64, True),
        # Where the groups of a collective are; XLA wrote them in the one, and now writes them in the other.
        ("replica_groups", 49, "Group", True),
        ("device_list", 87, "DeviceList", False),
    ],
    "Group": [("replica_ids", 1, _Field.TYPE_INT64, True)],
    "DeviceList": [("replica_groups", 1, "Group", True)],
    "Slice": [
        ("start", 1, _Field.TYPE_INT64, False),
        ("limit", 2, _Field.TYPE_INT64, False),
        ("stride", 3, _Field.TYPE_INT64, False),
    ],
    "Computation": [
        ("instructions", 2, "Instruction", True),
        ("id", 5, _Field.TYPE_INT64, False),
        ("root_id", 6, _Field.TYPE_INT64, False),
    ],
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

PRED, TUPLE = 1, 13
"""The types of truth values and of what holds several arrays. Source: as above."""

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


MESSAGES = _messages()


def module_name(hlo: bytes) -> str:
    """Return the name of a serialised HloModuleProto."""
    name: str = parsed("Module", hlo).name
    return name


def results(hlo: bytes) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtype and sizes of each result of a serialised HloModuleProto.

    Raises:
        PjrtError: a size is not known before the program runs.
    """
    module = parsed("Module", hlo)
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


def parameters(hlo: bytes) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtype and sizes of each argument that a serialised HloModuleProto takes."""
    shapes = parsed("Module", hlo).host_program_shape.parameters
    flat = [
        part
        for shape in shapes
        for part in (shape.tuple_shapes if shape.element_type not in _PRIMITIVES else [shape])
    ]
    return [(_PRIMITIVES[part.element_type], tuple(part.dimensions)) for part in flat]


def size_bytes(shape: Any) -> int:
    """Return what an array of a shape takes; 0 for what is no array."""
    dtype = _PRIMITIVES.get(shape.element_type, "token")
    count: int = math.prod(shape.dimensions)
    return count * width(dtype)


def donated(hlo: bytes) -> frozenset[int]:
    """Return the numbers of the parameters whose memory the results take over."""
    return frozenset(one.parameter_number for one in parsed("Module", hlo).input_output_alias.entries)


def collectives(hlo: bytes) -> tuple[str, ...]:
    """Return the kinds of collectives in a serialised HloModuleProto, each once."""
    found = {
        instruction.opcode.removesuffix("-start")
        for computation in parsed("Module", hlo).computations
        for instruction in computation.instructions
    }
    return tuple(kind for kind in _COLLECTIVES if kind in found)


def with_config(hlo: bytes) -> bytes:
    """Return a serialised HloModuleProtoWithConfig whose entry layout is the program's own shape.

    torch_xla reads result layouts from there, and ends the process where there is none.
    """
    whole = MESSAGES["ModuleWithConfig"]()
    whole.hlo_module.MergeFromString(hlo)
    whole.config.entry_computation_layout.CopyFrom(whole.hlo_module.host_program_shape)
    data: bytes = whole.SerializeToString()
    return data


def parsed(name: str, data: bytes) -> Any:
    """Return a message of this schema."""
    message = MESSAGES[name]()
    message.ParseFromString(data)
    return message
