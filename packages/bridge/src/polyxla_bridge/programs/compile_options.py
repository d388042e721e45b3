"""The compile options of a program from elsewhere, without those that name files of this machine."""

from __future__ import annotations

from collections.abc import Iterator

from polyxla_bridge.programs.hlo_pb2 import CompileOptionsProto

_VARINT, _EIGHT_BYTES, _TEXT, _FOUR_BYTES = 0, 1, 2, 5
"""Kinds of fields. Source: https://protobuf.dev/programming-guides/encoding/"""


def without_texts(options: bytes) -> bytes:
    """Return compile options without every debug option and every override whose value is a text.

    Such as ``xla_dump_to``: XLA reads and writes the files that they name, and only texts can name one.

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
    # The overrides are a map, whose order is free otherwise.
    return asked.SerializeToString(deterministic=True)


def _without_texts(message: bytes) -> bytes:
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
