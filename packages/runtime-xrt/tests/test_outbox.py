"""What waits to be sent: in order, together, not too much of it, and frees behind everything."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from polyxla_xrt.protocol.outbox import LIMIT_BYTES, Outbox

SOON_S = 10.0
MIB = 1 << 20


def drained(outbox: Outbox) -> list[list[object]]:
    outbox.close()
    return list(iter(outbox.take, None))


def test_what_has_gathered_travels_together_and_in_order() -> None:
    outbox = Outbox()
    for number in range(1000):
        assert outbox.put(number)
    assert drained(outbox) == [list(range(1000))]


@pytest.mark.parametrize(
    ("sizes", "packed"),
    [
        ([2 * MIB], [1]),
        ([MIB // 2, MIB // 4, MIB // 2], [2, 1]),
        ([0, 2 * MIB, 0, 0], [1, 1, 2]),
        ([MIB, MIB], [1, 1]),
    ],
)
def test_a_message_is_cut_before_it_is_too_large(sizes: list[int], packed: list[int]) -> None:
    outbox = Outbox()
    for size in sizes:
        outbox.put(size, size)
    together = drained(outbox)
    assert [len(one) for one in together] == packed
    assert [size for one in together for size in one] == sizes


def test_messages_without_data_count_too() -> None:
    outbox = Outbox()
    for number in range(100_000):
        outbox.put(number)
    assert max(len(one) for one in drained(outbox)) < 50_000


def test_who_has_too_much_waits_until_it_is_taken() -> None:
    outbox = Outbox()
    with ThreadPoolExecutor(1) as pool:
        assert outbox.put("large", LIMIT_BYTES)
        more = pool.submit(outbox.put, "more")
        time.sleep(0.1)
        assert not more.done()
        assert outbox.put("in any case", may_wait=False)
        assert outbox.take() == ["large"]
        assert more.result(SOON_S)
        assert drained(outbox) == [["in any case", "more"]]


@pytest.mark.parametrize("end", [Outbox.cut, Outbox.close])
def test_an_end_frees_who_waits(end: object) -> None:
    outbox = Outbox()
    with ThreadPoolExecutor(1) as pool:
        assert outbox.put("large", LIMIT_BYTES)
        more = pool.submit(outbox.put, "more")
        time.sleep(0.1)
        assert not more.done()
        assert callable(end)
        end(outbox)
        assert not more.result(SOON_S)
    assert not outbox.put("late", may_wait=False)
    assert outbox.take() == (["large"] if end is Outbox.close else None)
    assert outbox.take() is None


def test_one_that_is_larger_than_all_room_goes_alone() -> None:
    outbox = Outbox()
    assert outbox.put("huge", 3 * LIMIT_BYTES)
    assert outbox.take() == ["huge"]


@pytest.mark.parametrize("end", [Outbox.cut, Outbox.close])
def test_an_end_wakes_who_takes(end: object) -> None:
    outbox = Outbox()
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(outbox.take)
        time.sleep(0.1)
        assert callable(end)
        end(outbox)
        assert taking.result(SOON_S) is None


def test_what_comes_last_comes_when_nothing_else_does() -> None:
    late = ["frees"]
    outbox = Outbox(lambda: late.pop() if late else None, linger_s=0.01)
    assert outbox.take() == ["frees"]
    late.append("more frees")
    outbox.put("one")
    assert outbox.take() == ["one", "more frees"]
    late.append("again")
    outbox.put("large", 2 * MIB)
    outbox.put("small")
    assert outbox.take() == ["large"]
    assert outbox.take() == ["small", "again"]


def test_what_comes_last_is_never_before_what_was_put_before_it() -> None:
    """A user puts its use of an array, and only then lets it go: the worker must hear of it in that order."""
    count = 600
    released: list[int] = []

    def last() -> list[int] | None:
        nonlocal released
        taken, released = released, []
        return taken or None

    # Without a pause: what is to come last is asked for all the time.
    outbox = Outbox(last, linger_s=0.0)

    def use() -> None:
        for number in range(count):
            outbox.put(number)
            released.append(number)
            if number % 7 == 0:
                time.sleep(0)
        time.sleep(0.05)
        outbox.close()

    user = threading.Thread(target=use)
    user.start()
    used: set[int] = set()
    freed: list[int] = []
    while (together := outbox.take()) is not None:
        for one in together:
            if isinstance(one, list):
                assert used.issuperset(one)
                freed += one
            else:
                used.add(one)
    user.join(SOON_S)
    assert used == set(range(count))
    assert freed == sorted(freed)


def test_many_threads_lose_nothing_and_each_keeps_its_order() -> None:
    outbox = Outbox()

    def put(thread: int) -> None:
        for number in range(2000):
            assert outbox.put((thread, number), 50_000)

    with ThreadPoolExecutor(4) as pool:
        puts = [pool.submit(put, thread) for thread in range(4)]
        found: list[tuple[int, int]] = []
        while len(found) < 8000:
            together = outbox.take()
            assert together
            found += together
        for one in puts:
            one.result(SOON_S)
    for thread in range(4):
        assert [number for who, number in found if who == thread] == list(range(2000))
    assert drained(outbox) == []
