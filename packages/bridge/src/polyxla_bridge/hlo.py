"""The parts of XLA's protocol buffers that are read here, as a minimal schema.

Fields that are not declared survive reading and writing, so a module can be changed without knowing
all of it.

Source: field numbers of xla/service/hlo.proto and xla/xla_data.proto, as of jaxlib 0.10.2.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto

_SCHEMA: dict[str, list[tuple[str, int, Any, bool]]] = {
    # name: [(field, number, a scalar type or the name of a message, repeated)]
    "Shape": [
        ("element_type", 2, _Field.TYPE_INT32, False),
        ("dimensions", 3, _Field.TYPE_INT64, True),
        ("tuple_shapes", 4, "Shape", True),
    ],
    "ProgramShape": [("parameters", 1, "Shape", True), ("result", 2, "Shape", False)],
    "Module": [("name", 1, _Field.TYPE_STRING, False), ("host_program_shape", 4, "ProgramShape", False)],
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
    """Return dtype and sizes of each result of a serialised HloModuleProto."""
    shape = _parsed("Module", hlo).host_program_shape.result
    # A tuple is flat here: torch_xla makes no nested ones.
    parts = shape.tuple_shapes if shape.element_type not in _PRIMITIVES else [shape]
    return [(_PRIMITIVES[part.element_type], tuple(part.dimensions)) for part in parts]


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
