"""Protobuf decoding of messages with bulk data that does not copy the data.

protobuf copies the data when it parses the message, and again at each read of the field. Here the generated
code parses only the rest of the message, and the data is a view of the bytes that arrived. That requires the
form that `bulk_encoding` writes: the data is the last field of its message. Any other form, and every message
that is invalid, is left to protobuf as a whole.
Source: the encoding of protocol buffers, https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol.bulk_encoding import MIN_BYTES

MAX_HEAD_BYTES = 4096
"""Longest message without its data that is read here: the type of an array fits, with any dimensions."""
MAX_MESSAGES = 1024
"""Maximum number of messages in a batch that is read here, one by one; protobuf is faster with more."""
_VARINT, _SIZED = 0, 2
"""The wire types of numbers, and of fields that begin with their length."""
_MAX_NUMBER_BYTES, _MAX_LENGTH_BYTES = 10, 5


class _OtherFormError(Exception):
    """The message does not have the form that `bulk_encoding` writes."""


class Decoded(NamedTuple):
    """A message, and its data.

    Attributes:
        message: a `pb.Command` or a `pb.Answer`.
        data: the data that `message` lacks; None if it lacks nothing.
    """

    message: Any
    data: memoryview | None = None


class _Form(NamedTuple):
    """Where the bulk data of a batch is.

    Attributes:
        batch: the type of the batch, whose messages are in field 1.
        messages: the name of that field.
        message: the type of a message.
        kind: the name and the number of the message's field with bulk data.
        head: the type of that field.
        field: the number of the data in it.
    """

    batch: Any
    messages: str
    message: Any
    kind: tuple[str, int]
    head: Any
    field: int


_COMMANDS = _Form(
    pb.Commands,
    "commands",
    pb.Command,
    ("upload", pb.Command.UPLOAD_FIELD_NUMBER),
    pb.Upload,
    pb.Upload.DATA_FIELD_NUMBER,
)
_ANSWERS = _Form(
    pb.Answers,
    "answers",
    pb.Answer,
    ("part", pb.Answer.PART_FIELD_NUMBER),
    pb.Part,
    pb.Part.DATA_FIELD_NUMBER,
)


def commands(encoded: bytes) -> Iterable[Decoded]:
    """Decode `pb.Commands`.

    Raises:
        google.protobuf.message.DecodeError: the message is invalid.
    """
    return _decode(encoded, _COMMANDS)


def answers(encoded: bytes) -> Iterable[Decoded]:
    """Decode `pb.Answers`.

    Raises:
        google.protobuf.message.DecodeError: the message is invalid.
    """
    return _decode(encoded, _ANSWERS)


def _decode(encoded: bytes, form: _Form) -> Iterable[Decoded]:
    # A smaller batch has no bulk data, and protobuf decodes it faster.
    if len(encoded) >= MIN_BYTES:
        try:
            return [_decode_one(body, form) for body in _split(memoryview(encoded))]
        except _OtherFormError:
            pass
    # The result is lazy, because the reader of a batch of a million messages may refuse the first.
    return map(Decoded, getattr(form.batch.FromString(encoded), form.messages))


def _split(batch: memoryview) -> list[memoryview]:
    """Return the encoded messages of a batch."""
    found: list[memoryview] = []
    at = 0
    while at < len(batch):
        number, wire, at = _tag(batch, at)
        if (number, wire) != (1, _SIZED) or len(found) == MAX_MESSAGES:
            raise _OtherFormError
        start, at = _extent(batch, at)
        found.append(batch[start:at])
    return found


def _decode_one(body: memoryview, form: _Form) -> Decoded:
    name, kind = form.kind
    if len(body) >= MIN_BYTES:
        number, wire, at = _tag(body, 0)
        if (number, wire) == (kind, _SIZED):
            start, end = _extent(body, at)
            # Another field follows the data, so that only protobuf can merge the message.
            if end != len(body):
                raise _OtherFormError
            head, data = _cut(body[start:], form.field)
            return Decoded(form.message(**{name: form.head.FromString(bytes(head))}), data)
    return Decoded(form.message.FromString(bytes(body)))


def _cut(message: memoryview, field: int) -> tuple[memoryview, memoryview]:
    """Cut a message into what precedes its data, and the data."""
    at = 0
    while at < min(len(message), MAX_HEAD_BYTES):
        # The data must be the last field. All fields before it are skipped here and left to protobuf.
        head = message[:at]
        number, wire, at = _tag(message, at)
        if wire == _SIZED:
            start, at = _extent(message, at)
            if number == field and at == len(message):
                return head, message[start:]
        elif wire == _VARINT:
            _, at = _varint(message, at, _MAX_NUMBER_BYTES)
        if number == field or wire not in (_VARINT, _SIZED):
            break
    raise _OtherFormError


def _tag(view: memoryview, at: int) -> tuple[int, int, int]:
    """Return the number and the wire type of the field at `at`, and where its content begins."""
    # A tag is one byte, because all fields here have numbers below 16.
    tag, at = _varint(view, at, 1)
    return tag >> 3, tag & 7, at


def _extent(view: memoryview, at: int) -> tuple[int, int]:
    """Return where the content begins and ends whose length is at `at`."""
    size, start = _varint(view, at, _MAX_LENGTH_BYTES)
    # The length comes from the peer, and a slice would silently be shorter.
    if start + size > len(view):
        raise _OtherFormError
    return start, start + size


def _varint(view: memoryview, at: int, max_bytes: int) -> tuple[int, int]:
    """Return the integer at `at`, and where it ends."""
    number = 0
    for place, byte in enumerate(view[at : at + max_bytes]):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number, at + place + 1
    raise _OtherFormError
