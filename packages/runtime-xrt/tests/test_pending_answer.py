"""An answer is assembled from its chunks, whether its size is known or not."""

from __future__ import annotations

import pytest

from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError
from polyxla_xrt.client.unanswered import PendingAnswer
from polyxla_xrt.proto import worker_pb2 as pb


@pytest.mark.parametrize("into", [None, memoryview(bytearray(6))])
@pytest.mark.parametrize("parts", [[b"abcdef"], [b"abc", b"def"], [b"a", b"bcde", b"f"], [b"abcdef", b""]])
def test_chunks_are_joined(into: memoryview | None, parts: list[bytes]) -> None:
    answer = PendingAnswer(into)
    for number, data in enumerate(parts, 1):
        assert not answer.done.done()
        assert answer.add(pb.Part(data=data, ends=number == len(parts))) is (number == len(parts))
    assert bytes(answer.done.result(0)) == b"abcdef"
    assert into is None or answer.done.result(0) is into


@pytest.mark.parametrize("parts", [[b"abcde"], [b"abcdefg"], [b"abc", b"defg"], [b"abcdefg", b"h"]])
def test_an_answer_of_another_size_than_its_memory_is_an_error(parts: list[bytes]) -> None:
    answer = PendingAnswer(memoryview(bytearray(6)))
    for number, data in enumerate(parts, 1):
        answer.add(pb.Part(ends=number == len(parts)), memoryview(data))
    sent = sum(map(len, parts))
    with pytest.raises(PjrtError, match=f"the worker sent {sent} bytes of an array of 6 bytes"):
        answer.done.result(0)


def test_an_answer_of_one_chunk_is_not_copied() -> None:
    answer, data = PendingAnswer(), memoryview(b"abc")
    assert answer.add(pb.Part(ends=True), data)
    assert answer.done.result(0) is data


def test_an_empty_answer_is_one_empty_chunk() -> None:
    answer = PendingAnswer()
    assert answer.add(pb.Part(ends=True))
    assert bytes(answer.done.result(0)) == b""


def test_a_failure_ends_the_answer_with_its_error() -> None:
    answer = PendingAnswer(memoryview(bytearray(6)))
    assert not answer.add(pb.Part(data=b"abc"))
    assert answer.add(pb.Part(ends=True, failure=pb.Failure(code=Code.NOT_FOUND, message="no array 3")))
    with pytest.raises(PjrtError, match="no array 3"):
        answer.done.result(0)


def test_a_lost_worker_fails_only_incomplete_answers() -> None:
    complete, incomplete = PendingAnswer(), PendingAnswer()
    complete.add(pb.Part(data=b"x", ends=True))
    for answer in (complete, incomplete):
        answer.fail(PjrtError(Code.UNAVAILABLE, "the worker is gone"))
    assert bytes(complete.done.result(0)) == b"x"
    with pytest.raises(PjrtError, match="the worker is gone"):
        incomplete.done.result(0)
