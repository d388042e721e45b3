"""What a framework sends to be compiled: programs in StableHLO, and compile options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.hlo_pb2 import CompileOptionsProto

PORTABLE = re.compile(rb"ML\xefR.{1,2}StableHLO_v(\d+\.\d+\.\d+)", re.DOTALL)
"""The beginning of StableHLO that later versions can read: MLIR's magic number, the version of its bytecode,
and the name and version of the producer.

Source: https://mlir.llvm.org/docs/BytecodeFormat, and serializePortableArtifact in stablehlo.
"""


def to_hlo(program: bytes) -> bytes:
    """Return a program in StableHLO as a serialised HloModuleProto.

    Args:
        program: MLIR as text or bytecode, or a portable artifact.

    Raises:
        PjrtError: the program cannot be read, and its StableHLO is newer than jaxlib's.
        Exception: any other error of jaxlib's parser.
    """
    # Imported here, because programs of torch_xla need no MLIR.
    from jax.interpreters import mlir
    from jaxlib import _jax

    # A portable artifact is first translated to this jaxlib's StableHLO.
    module: Any = program
    if found := PORTABLE.match(program):
        try:
            with mlir.make_ir_context() as context:
                module = str(_jax.mlir.deserialize_portable_artifact(program, context))
        except Exception as error:
            _explain_newer(found[1].decode(), error)
            raise
    computation = _jax.mlir.mlir_module_to_xla_computation(module, use_tuple_args=False, return_tuple=False)
    proto: bytes = computation.as_serialized_hlo_module_proto()
    return proto


def _explain_newer(theirs: str, error: Exception) -> None:
    """Raise an error that names both versions, if the program's is newer than the one that jaxlib has.

    It is called only after an error: a program of a newer version is read if it uses none of the newer
    operations.
    """
    from jaxlib.mlir.dialects import stablehlo

    ours: str = stablehlo.get_current_version()
    if _numbers(theirs) > _numbers(ours):
        raise PjrtError(
            Code.UNIMPLEMENTED,
            f"the program is StableHLO {theirs}, and jaxlib {version('jaxlib')} reads up to {ours}: "
            "install a newer jaxlib, or an older release of the framework that made the program",
        ) from error


def _numbers(dotted: str) -> tuple[int, ...]:
    return tuple(map(int, dotted.split(".")))


_VARINT, _EIGHT_BYTES, _TEXT, _FOUR_BYTES = 0, 1, 2, 5
"""Kinds of fields. Source: https://protobuf.dev/programming-guides/encoding/"""


def without_texts(options: bytes) -> bytes:
    """Return compile options without the debug options and overrides whose value is a text.

    Some of these, such as ``xla_dump_to``, name files that XLA reads or writes; only a text can name a file.

    Args:
        options: a serialised CompileOptionsProto.

    Raises:
        ValueError: it is damaged.
    """
    asked = CompileOptionsProto.FromString(options)
    build = asked.executable_build_options
    if build.HasField("debug_options"):
        build.debug_options = _without_texts(build.debug_options)
    for name, override in list(asked.env_option_overrides.items()):
        if override.HasField("string_field"):
            del asked.env_option_overrides[name]
    # The overrides are a map, whose order would otherwise be arbitrary.
    return asked.SerializeToString(deterministic=True)


def _without_texts(message: bytes) -> bytes:
    # The debug options are read field by field, because hlo.proto does not declare them. Messages are encoded
    # with the same kind as texts, and are left out as well.
    return b"".join(whole for _, kind, _, whole in _fields(message) if kind != _TEXT)


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes, bytes]]:
    """Yield number, kind, content and encoding of each field.

    Raises:
        ValueError: the message is damaged.
    """
    position = 0
    while position < len(message):
        begin = position
        tag, position = _varint(message, position)
        number, kind = tag >> 3, tag & 7
        start = position
        if kind == _VARINT:
            _, position = _varint(message, position)
        elif kind == _TEXT:
            length, start = _varint(message, position)
            position = start + length
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            position += 8 if kind == _EIGHT_BYTES else 4
        else:
            raise ValueError(f"field {number} of the options has the kind {kind}")
        if position > len(message):
            raise ValueError("the options end amid a field")
        yield number, kind, message[start:position], message[begin:position]


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(message):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError("the options end amid a number")
