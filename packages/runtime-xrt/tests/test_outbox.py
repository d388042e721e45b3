"""The send queue keeps order, batches messages, limits their size and sends deferred messages last."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from polyxla_xrt.protocol.outbox import LIMIT_BYTES, Outbox

SOON_S = 30.0
MIB = 1 << 20


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def is_waited_on(outbox: Outbox) -> bool:
    """Return whether a thread waits for the outbox to change."""
    return bool(vars(outbox._changed)["_waiters"])


def drained(outbox: Outbox) -> list[list[object]]:
    outbox.close()
    return list(iter(outbox.take, None))


def test_gathered_messages_travel_together_in_order() -> None:
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
def test_a_batch_ends_before_it_is_too_large(sizes: list[int], packed: list[int]) -> None:
    outbox = Outbox()
    for size in sizes:
        outbox.put(size, size)
    together = drained(outbox)
    assert [len(message) for message in together] == packed
    assert [size for message in together for size in message] == sizes


def test_messages_without_data_count_towards_the_limit() -> None:
    outbox = Outbox()
    for number in range(100_000):
        outbox.put(number)
    assert max(len(message) for message in drained(outbox)) < 50_000


def test_put_blocks_while_the_outbox_is_full() -> None:
    outbox = Outbox()
    with ThreadPoolExecutor(1) as pool:
        assert outbox.put("large", LIMIT_BYTES)
        more = pool.submit(outbox.put, "more")
        until(lambda: is_waited_on(outbox))
        assert not more.done()
        assert outbox.put("in any case", may_wait=False)
        assert outbox.take() == ["large"]
        assert more.result(SOON_S)
        assert drained(outbox) == [["in any case", "more"]]


@pytest.mark.parametrize("end", [Outbox.cut, Outbox.close])
def test_the_end_wakes_a_blocked_put(end: object) -> None:
    outbox = Outbox()
    with ThreadPoolExecutor(1) as pool:
        assert outbox.put("large", LIMIT_BYTES)
        more = pool.submit(outbox.put, "more")
        until(lambda: is_waited_on(outbox))
        assert not more.done()
        assert callable(end)
        end(outbox)
        assert not more.result(SOON_S)
    assert not outbox.put("late", may_wait=False)
    assert outbox.take() == (["large"] if end is Outbox.close else None)
    assert outbox.take() is None


def test_a_message_larger_than_the_limit_travels_alone() -> None:
    outbox = Outbox()
    assert outbox.put("huge", 3 * LIMIT_BYTES)
    assert outbox.take() == ["huge"]


@pytest.mark.parametrize("end", [Outbox.cut, Outbox.close])
def test_the_end_wakes_a_blocked_take(end: object) -> None:
    outbox = Outbox()
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(outbox.take)
        until(lambda: is_waited_on(outbox))
        assert not taking.done()
        assert callable(end)
        end(outbox)
        assert taking.result(SOON_S) is None


def test_deferred_messages_follow_when_the_queue_is_empty() -> None:
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


def test_a_deferred_message_never_overtakes_messages_queued_before_it() -> None:
    """A client queues its use of an array, then frees the array: the worker must get both in this order."""
    count = 600
    released: list[int] = []

    def last() -> list[int] | None:
        nonlocal released
        taken, released = released, []
        return taken or None

    # With no pause between its calls, `last` competes with every `put`.
    outbox = Outbox(last, linger_s=0.0)

    def use() -> None:
        for number in range(count):
            outbox.put(number)
            released.append(number)
            if number % 7 == 0:
                time.sleep(0)
        # All frees are taken while the outbox is open.
        until(lambda: not released)
        outbox.close()

    user = threading.Thread(target=use)
    user.start()
    used: set[int] = set()
    freed: list[int] = []
    while (together := outbox.take()) is not None:
        for message in together:
            if isinstance(message, list):
                assert used.issuperset(message)
                freed += message
            else:
                used.add(message)
    user.join(SOON_S)
    assert used == set(range(count))
    assert freed == list(range(count))


def test_concurrent_puts_lose_nothing_and_keep_each_threads_order() -> None:
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
        for done in puts:
            done.result(SOON_S)
    for thread in range(4):
        assert [number for who, number in found if who == thread] == list(range(2000))
    assert drained(outbox) == []
