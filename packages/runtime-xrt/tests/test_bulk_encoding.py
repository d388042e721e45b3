"""Messages with bulk data are encoded as protobuf encodes them."""

from __future__ import annotations

import pytest

from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol import bulk_encoding

SIZES = [
    0,
    1,
    127,
    bulk_encoding.MIN_BYTES - 1,
    bulk_encoding.MIN_BYTES,
    bulk_encoding.MIN_BYTES + 1,
    (1 << 21) + 3,
]


@pytest.mark.parametrize("size", SIZES)
def test_protobuf_parses_encoded_messages(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    head = pb.Upload(array=300, type=pb.ArrayType(dtype="float32", dims=[7, 1]), core=3, ends=True)
    first = pb.Command(release=pb.Release(arrays=[1, 2]))
    written = bulk_encoding.encode([first, bulk_encoding.upload(head, memoryview(data)), first])
    head.data = data
    assert pb.Commands.FromString(written) == pb.Commands(commands=[first, pb.Command(upload=head), first])
    part = pb.Part(request=1 << 40, ends=True)
    written = bulk_encoding.encode([bulk_encoding.part(part, data), pb.Answer(attached=pb.Attached())])
    part.data = data
    read = pb.Answers.FromString(written)
    assert read == pb.Answers(answers=[pb.Answer(part=part), pb.Answer(attached=pb.Attached())])


def test_large_data_is_copied_only_when_it_is_encoded() -> None:
    data = bytearray(bulk_encoding.MIN_BYTES)
    message = bulk_encoding.part(pb.Part(request=1), memoryview(data))
    assert isinstance(message, bulk_encoding.BulkMessage)
    data[0] = 9
    assert pb.Answers.FromString(bulk_encoding.encode([message])).answers[0].part.data[0] == 9
