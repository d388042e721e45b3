"""Copying ahead: the order, errors, and loops that end early."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator

import pytest

from polyxla import StalledError, UsageError
from polyxla_torchtpu.upload import upload_batches

Numbers = Generator[int]


@pytest.fixture(autouse=True)
def _no_threads_are_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()


def numbers(count: int, fail_at: int | None = None) -> Numbers:
    for number in range(count):
        if number == fail_at:
            raise OSError("the disk is gone")
        yield number


def upload(source: Numbers, to_device: Callable[[int], int] = lambda n: n * 10, **prefetch: int) -> Numbers:
    return upload_batches(source, to_device, prefetch, 30.0)


def test_batches_arrive_in_order() -> None:
    assert list(upload(numbers(50))) == [n * 10 for n in range(50)]


def test_an_error_takes_the_place_of_its_batch() -> None:
    batches = upload(numbers(9, fail_at=3))
    assert [next(batches) for _ in range(3)] == [0, 10, 20]
    with pytest.raises(OSError, match="disk is gone"):
        next(batches)


def test_an_error_of_a_copy_is_raised_too() -> None:
    with pytest.raises(ZeroDivisionError):
        list(upload(numbers(3), lambda n: 1 // n))


def test_a_loop_that_is_left_closes_its_source() -> None:
    closed = []

    def source() -> Numbers:
        try:
            yield from range(1000)
        finally:
            closed.append(True)

    for _ in upload(source()):
        break
    deadline = time.monotonic() + 5
    while not closed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert closed == [True]


def test_no_more_is_read_than_the_options_say() -> None:
    read = []

    def source() -> Numbers:
        for number in range(100):
            read.append(number)
            yield number

    batches = upload(source(), loader_prefetch_size=1, device_prefetch_size=1)
    next(batches)
    time.sleep(0.3)
    # One is used, one on the device and one on the host, and each thread holds one.
    assert len(read) <= 5
    batches.close()


def test_a_batch_that_does_not_come_is_an_error() -> None:
    release = threading.Event()

    def source() -> Numbers:
        yield 1
        release.wait(20)

    with pytest.raises(StalledError, match="no batch arrived in 1 s"):
        list(upload_batches(source(), lambda n: n, {}, 1.0))
    release.set()


@pytest.mark.parametrize("options", [{"ahead": 3}, {"host_to_device_transfer_threads": 2}])
def test_an_unknown_option_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        list(upload_batches(numbers(1), int, options, 30.0))
