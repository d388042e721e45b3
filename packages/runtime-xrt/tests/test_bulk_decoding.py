"""Messages with bulk data are decoded as protobuf decodes them, and their data is not copied."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol import bulk_decoding, bulk_encoding
from polyxla_xrt.protocol.bulk_encoding import MIN_BYTES

DATA = bytes(range(256)) * (MIN_BYTES // 256)
HEAD = pb.Upload(array=300, type=pb.ArrayType(dtype="float32", dims=[7, 1]), core=3, ends=True)
SMALL = pb.Command(release=pb.Release(arrays=[1, 2]))


def batch(*messages: Any) -> bytes:
    return bulk_encoding.encode(messages)


def sized(field: int, content: bytes) -> bytes:
    """Return the encoding of a field with a length."""
    return batch(content_of(content)).replace(b"\n", bytes([field << 3 | 2]), 1)


class content_of:  # noqa: N801  (stands for a message)
    def __init__(self, content: bytes) -> None:
        self.SerializeToString = lambda: content


def whole(decoded: bulk_decoding.Decoded) -> pb.Command:
    """Return a decoded command with its data."""
    command: pb.Command = decoded.message
    if decoded.data is not None:
        command.upload.data = bytes(decoded.data)
    return command


def outcome(decode: Any, encoded: bytes) -> list[pb.Command] | None:
    """Return the commands of a batch; None if it is invalid."""
    try:
        return list(decode(encoded))
    except DecodeError:
        return None


def by_protobuf(encoded: bytes) -> list[pb.Command] | None:
    return outcome(lambda data: pb.Commands.FromString(data).commands, encoded)


def by_us(encoded: bytes) -> list[pb.Command] | None:
    return outcome(lambda data: map(whole, bulk_decoding.commands(data)), encoded)


def test_the_data_is_a_view_of_the_message() -> None:
    encoded = batch(SMALL, bulk_encoding.upload(HEAD, DATA), SMALL)
    first, second, third = bulk_decoding.commands(encoded)
    assert first == third == (SMALL, None)
    assert second.message == pb.Command(upload=HEAD)
    assert second.data is not None
    assert second.data.obj is encoded
    assert second.data == DATA


def test_answers_are_decoded_like_commands() -> None:
    part = pb.Part(request=1 << 40, ends=True)
    encoded = batch(bulk_encoding.part(part, DATA), pb.Answer(attached=pb.Attached()))
    first, second = bulk_decoding.answers(encoded)
    assert first == (pb.Answer(part=part), memoryview(DATA))
    assert second == (pb.Answer(attached=pb.Attached()), None)


BODY = HEAD.SerializeToString()
OTHER_FORMS = {
    "the data first": sized(1, sized(2, sized(4, DATA) + BODY)),
    "the data twice": sized(1, sized(2, BODY + sized(4, DATA[:9]) + sized(4, DATA))),
    "another field after the data": sized(1, sized(2, BODY + sized(4, DATA) + b"\x28\x01")),
    "an unknown field before the data": sized(1, sized(2, b"\x31" + bytes(8) + BODY + sized(4, DATA))),
    "an upload in two parts": sized(1, sized(2, BODY) + sized(2, sized(4, DATA))),
    "another kind after the upload": sized(1, sized(2, BODY + sized(4, DATA)) + sized(9, b"")),
    "data that is a number": sized(1, sized(2, BODY + b"\x20\x05" + sized(14, DATA))),
    "an unknown field of the batch": sized(15, b"x") + batch(bulk_encoding.upload(HEAD, DATA)),
    "a large message of another kind": batch(pb.Command(compile=pb.Compile(hlo=DATA))),
    "many messages": batch(*[pb.Command()] * (bulk_decoding.MAX_MESSAGES + 1), content_of(sized(9, DATA))),
    "a long head": sized(1, sized(2, sized(2, sized(1, DATA[:5000] and b"x" * 5000)) + sized(4, DATA))),
    "the end of the batch in its data": batch(bulk_encoding.upload(HEAD, DATA))[:-1],
    "the end of the batch in a length": sized(1, sized(2, DATA))[:2],
    "a length of 11 bytes": sized(1, b"\x12" + b"\xff" * 11 + DATA),
    "text that is not UTF-8": sized(1, sized(2, sized(2, sized(1, b"\xff")) + sized(4, DATA))),
}


@pytest.mark.parametrize("encoded", OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_other_forms_mean_what_they_mean_to_protobuf(encoded: bytes) -> None:
    assert by_us(encoded) == by_protobuf(encoded)


@settings(max_examples=500, deadline=None)
@given(
    cuts=st.lists(st.tuples(st.integers(0, 40), st.binary(max_size=4), st.integers(0, 4)), max_size=3),
    end=st.integers(0, 50),
)
@example(cuts=[], end=0)
def test_damaged_messages_mean_what_they_mean_to_protobuf(
    cuts: list[tuple[int, bytes, int]], end: int
) -> None:
    encoded = batch(bulk_encoding.upload(HEAD, DATA), SMALL)
    for at, new, dropped in cuts:
        encoded = encoded[:at] + new + encoded[at + dropped :]
    encoded = encoded[: len(encoded) - end]
    assert by_us(encoded) == by_protobuf(encoded)
