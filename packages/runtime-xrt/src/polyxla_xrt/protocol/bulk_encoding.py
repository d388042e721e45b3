"""Protobuf encoding of messages with bulk data that copies the data only once.

protobuf itself copies the data at each level of nesting: `benchmarks/xrt.py encoding` measures the gain. The
output is standard protobuf, which the receiver parses with the generated code. A field is its tag, its length
and its bytes; a nested message is such a field; fields may come in any order.
Source: the encoding of protocol buffers, https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from polyxla_xrt.proto import worker_pb2 as pb

MIN_BYTES = 1 << 14
"""Smallest data that is encoded here: protobuf encodes smaller messages faster."""

Buffer = bytes | memoryview


class BulkMessage:
    """A command or an answer whose data is copied once, when it is encoded.

    Args:
        kind: the number of its field in `pb.Command` or `pb.Answer`.
        head: the encoded message without the data.
        field: the number of the data's field.
        data: the data; it must not change until the message is encoded.
    """

    __slots__ = ("buffers", "size")

    def __init__(self, kind: int, head: bytes, field: int, data: Buffer) -> None:
        inner = _tag(field) + _varint(len(data))
        # The data stays outside: only its length is needed here, and `encode` joins all buffers in one copy.
        body = len(head) + len(inner) + len(data)
        self.buffers: tuple[Buffer, ...] = (_tag(kind) + _varint(body) + head + inner, data)
        self.size = sum(len(buffer) for buffer in self.buffers)


def upload(head: pb.Upload, data: Buffer) -> pb.Command | BulkMessage:
    """Return a command that uploads a chunk of an array."""
    if len(data) < MIN_BYTES:
        head.data = bytes(data)
        return pb.Command(upload=head)
    kind, field = pb.Command.UPLOAD_FIELD_NUMBER, pb.Upload.DATA_FIELD_NUMBER
    return BulkMessage(kind, head.SerializeToString(), field, data)


def part(head: pb.Part, data: Buffer) -> pb.Answer | BulkMessage:
    """Return an answer with a chunk of the reply to a request."""
    if len(data) < MIN_BYTES:
        head.data = bytes(data)
        return pb.Answer(part=head)
    kind, field = pb.Answer.PART_FIELD_NUMBER, pb.Part.DATA_FIELD_NUMBER
    return BulkMessage(kind, head.SerializeToString(), field, data)


def encode(messages: Iterable[Any]) -> bytes:
    """Encode commands as `pb.Commands`, or answers as `pb.Answers`: both hold their messages in field 1."""
    buffers: list[Buffer] = []
    for message in messages:
        if isinstance(message, BulkMessage):
            buffers += (_MESSAGE + _varint(message.size), *message.buffers)
        else:
            body = message.SerializeToString()
            buffers += (_MESSAGE + _varint(len(body)), body)
    return b"".join(buffers)


def encode_all(take: Callable[[], list[Any] | None]) -> Iterator[bytes]:
    """Encode one batch after another, until `take` returns None."""
    while (batch := take()) is not None:
        encoded = encode(batch)
        # Without this, the data of a batch would stay in memory until the next batch.
        del batch
        yield encoded


def _tag(field: int) -> bytes:
    # Field numbers here are below 16, so a tag is one byte. Wire type 2 means that a length follows, and then
    # as many bytes.
    return bytes([field << 3 | 2])


def _varint(number: int) -> bytes:
    """Encode an integer, seven bits per byte, lowest first; the highest bit marks that more bytes follow."""
    low = bytearray()
    while number > 0x7F:
        low.append(number & 0x7F | 0x80)
        number >>= 7
    low.append(number)
    return bytes(low)


_MESSAGE = _tag(1)
