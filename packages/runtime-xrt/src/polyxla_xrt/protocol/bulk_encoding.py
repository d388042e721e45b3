"""Messages that carry much data, written without the copies that protobuf makes of every level.

What is written is what protobuf would write, and is read by it. A field is its tag, its length, and its
bytes; a message in a message is such a field; fields may come in any order.
Source: the encoding of protocol buffers, https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from polyxla_xrt.proto import worker_pb2 as pb

LEAST_BYTES = 1 << 14
"""What is smaller is quicker copied than written by hand."""

Buffer = bytes | memoryview


class Bulk:
    """A command or an answer whose data is copied only once, when it is sent.

    Args:
        kind: the field of `pb.Command` or `pb.Answer` that it is.
        head: everything but the data.
        field: the field of the data.
        data: not changed until it is sent.
    """

    __slots__ = ("buffers", "size")

    def __init__(self, kind: int, head: bytes, field: int, data: Buffer) -> None:
        inner = _tag(field) + _varint(len(data))
        body = len(head) + len(inner) + len(data)
        self.buffers: tuple[Buffer, ...] = (_tag(kind) + _varint(body) + head + inner, data)
        self.size = sum(len(one) for one in self.buffers)


def upload(head: pb.Upload, data: Buffer) -> pb.Command | Bulk:
    """Return a command with a piece of an array."""
    if len(data) < LEAST_BYTES:
        head.data = bytes(data)
        return pb.Command(upload=head)
    return Bulk(pb.Command.UPLOAD_FIELD_NUMBER, head.SerializeToString(), pb.Upload.DATA_FIELD_NUMBER, data)


def part(head: pb.Part, data: Buffer) -> pb.Answer | Bulk:
    """Return an answer with a piece of what was asked for."""
    if len(data) < LEAST_BYTES:
        head.data = bytes(data)
        return pb.Answer(part=head)
    return Bulk(pb.Answer.PART_FIELD_NUMBER, head.SerializeToString(), pb.Part.DATA_FIELD_NUMBER, data)


def encode(messages: Iterable[Any]) -> bytes:
    """Write `pb.Commands` of commands, or `pb.Answers` of answers: both have them in their first field."""
    buffers: list[Buffer] = []
    for message in messages:
        if isinstance(message, Bulk):
            buffers += (_MESSAGE + _varint(message.size), *message.buffers)
        else:
            body = message.SerializeToString()
            buffers += (_MESSAGE + _varint(len(body)), body)
    return b"".join(buffers)


def _tag(field: int) -> bytes:
    # All of these are below 16, so that a tag is one byte; 2 says that a length follows.
    return bytes([field << 3 | 2])


def _varint(number: int) -> bytes:
    """Write a number, seven bits a byte, the lowest first; the highest bit says that more follow."""
    low = bytearray()
    while number > 0x7F:
        low.append(number & 0x7F | 0x80)
        number >>= 7
    low.append(number)
    return bytes(low)


_MESSAGE = _tag(1)
