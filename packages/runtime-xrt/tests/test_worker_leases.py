"""A worker's cores go to one job at a time, in order. Threads only: no port and no engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol.outbox import Outbox
from polyxla_xrt.server.worker import leases
from polyxla_xrt.server.worker.leased_job import LeasedJob
from polyxla_xrt.server.worker.leases import ClosedError, DrainingError, HeldError, Leases, QueueFullError
from polyxla_xrt.server.worker.session import MemoryBudget

SOON_S = 30.0
ENDED = PjrtError(Code.ABORTED, "it is over")


def job(user: str = "ann") -> LeasedJob:
    def no_engine() -> Any:
        raise PjrtError(Code.UNAVAILABLE, "there are no cores")

    return LeasedJob(
        pb.Holder(host="here", pid=7, user=user, command="train.py"), 2, "", 100, no_engine, 3.0, "key"
    )


def acquired(held: Leases[LeasedJob], user: str = "ann", wait_s: float = 0.0) -> LeasedJob:
    got = held.acquire(lambda: job(user), 2, wait_s, lambda: False)
    assert got is not None
    return got


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as pool:
        yield pool


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_error_of_a_second_job_names_the_holder() -> None:
    cores: Leases[LeasedJob] = Leases(2)
    first = acquired(cores)
    assert cores.jobs == (first,)
    with pytest.raises(HeldError) as caught:
        acquired(cores, "bob")
    assert caught.value.jobs == [first.describe()]
    assert (cores.waiting, cores.served) == (0, 1)
    cores.give_back(first)
    assert acquired(cores, "bob").holder.user == "bob"
    assert cores.served == 2


def test_waiting_jobs_are_served_in_order(pool: ThreadPoolExecutor) -> None:
    cores: Leases[LeasedJob] = Leases(2)
    order: list[int] = []
    first = acquired(cores)

    def wait(number: int) -> None:
        got = acquired(cores, wait_s=SOON_S)
        order.append(number)
        cores.give_back(got)

    waiting: list[Future[None]] = []
    for number in range(8):
        waiting.append(pool.submit(wait, number))
        until(lambda: cores.waiting == len(waiting))
    with pytest.raises(HeldError):
        acquired(cores, "impatient")
    cores.give_back(first)
    for answer in waiting:
        answer.result(SOON_S)
    assert order == list(range(8))
    assert cores.jobs == ()


def test_a_job_that_does_not_wait_cannot_overtake_one_that_does(pool: ThreadPoolExecutor) -> None:
    cores: Leases[LeasedJob] = Leases(2)
    first = acquired(cores)
    is_gone = threading.Event()
    waiting = pool.submit(cores.acquire, job, 2, SOON_S, is_gone.is_set)
    until(lambda: cores.waiting == 1)
    cores.give_back(first)
    got = waiting.result(SOON_S)
    assert got is not None
    with pytest.raises(HeldError):
        acquired(cores)


def test_a_client_that_has_gone_loses_its_place(pool: ThreadPoolExecutor) -> None:
    cores: Leases[LeasedJob] = Leases(2)
    first = acquired(cores)
    is_gone = threading.Event()
    waiting = pool.submit(cores.acquire, job, 2, SOON_S, is_gone.is_set)
    until(lambda: cores.waiting == 1)
    behind = pool.submit(acquired, cores, "bob", SOON_S)
    until(lambda: cores.waiting == 2)
    is_gone.set()
    assert waiting.result(SOON_S) is None
    cores.give_back(first)
    assert behind.result(SOON_S).holder.user == "bob"


def test_a_wait_ends_after_its_timeout() -> None:
    cores: Leases[LeasedJob] = Leases(2)
    acquired(cores)
    begin = time.monotonic()
    with pytest.raises(HeldError):
        acquired(cores, wait_s=0.5)
    assert 0.5 <= time.monotonic() - begin < SOON_S


def test_every_job_waits_for_one_that_has_ended(pool: ThreadPoolExecutor) -> None:
    cores: Leases[LeasedJob] = Leases(2)
    first = acquired(cores)
    first.end(ENDED)
    next_one = pool.submit(acquired, cores, "bob", 0.0)
    # It waits, although it would not wait for a job that still runs.
    until(lambda: bool(vars(cores._changed)["_waiters"]))
    assert not next_one.done()
    cores.give_back(first)
    assert next_one.result(SOON_S).holder.user == "bob"


def test_a_full_queue_refuses_further_jobs(pool: ThreadPoolExecutor) -> None:
    cores: Leases[LeasedJob] = Leases(2)
    acquired(cores)
    is_gone = threading.Event()
    crowd = [pool.submit(cores.acquire, job, 2, SOON_S, is_gone.is_set) for _ in range(leases.MAX_WAITING)]
    until(lambda: cores.waiting == leases.MAX_WAITING)
    with pytest.raises(QueueFullError):
        acquired(cores)
    is_gone.set()
    assert {answer.result(SOON_S) for answer in crowd} == {None}


def test_a_draining_worker_refuses_new_and_waiting_jobs(pool: ThreadPoolExecutor) -> None:
    cores: Leases[LeasedJob] = Leases(2)
    first = acquired(cores)
    waiting = pool.submit(acquired, cores, "bob", SOON_S)
    until(lambda: cores.waiting == 1)
    cores.drain()
    with pytest.raises(DrainingError):
        waiting.result(SOON_S)
    assert cores.jobs == (first,)
    cores.give_back(first)
    with pytest.raises(DrainingError):
        acquired(cores)


def test_a_process_that_ends_grants_no_cores_to_those_that_wait(pool: ThreadPoolExecutor) -> None:
    cores: Leases[LeasedJob] = Leases(2)
    first = acquired(cores)
    waiting = pool.submit(acquired, cores, "bob", SOON_S)
    until(lambda: cores.waiting == 1)
    cores.close()
    cores.give_back(first)
    with pytest.raises(ClosedError):
        waiting.result(SOON_S)
    with pytest.raises(ClosedError):
        acquired(cores)


def test_a_job_that_fails_to_start_leaves_the_cores_free() -> None:
    cores: Leases[LeasedJob] = Leases(2)

    def fail() -> LeasedJob:
        raise OSError("no port")

    with pytest.raises(OSError, match="no port"):
        cores.acquire(fail, 2, 0.0, lambda: False)
    assert (cores.jobs, cores.waiting) == ((), 0)
    acquired(cores)


def test_only_the_holder_can_return_the_cores() -> None:
    cores: Leases[LeasedJob] = Leases(2)
    first = acquired(cores)
    cores.give_back(job())
    assert cores.jobs == (first,)
    idle = cores.idle_since
    cores.give_back(first)
    assert cores.idle_since > idle


def test_a_memory_budget_names_its_job_and_counts_returned_memory() -> None:
    budget = MemoryBudget(3 << 20, "ann@here (pid 7, train.py)")
    assert budget.take(2 << 20) is None
    assert budget.take(2 << 20) == (
        "the job of ann@here (pid 7, train.py) may hold 3 MiB of this worker's memory, holds 2 MiB, and "
        "requests 2.0 MiB more"
    )
    budget.give_back(1 << 20)
    assert budget.take(2 << 20) is None
    assert budget.held_bytes == 3 << 20


def test_a_job_keeps_its_first_reason_and_cannot_close_without_an_engine() -> None:
    ended = job()
    with pytest.raises(PjrtError, match="there are no cores"):
        ended.attach(0, [0], Outbox(), SOON_S)
    ended.end(ENDED)
    ended.end(PjrtError(Code.INTERNAL, "later"))
    assert ended.why == pb.Failure(code=Code.ABORTED, message="it is over")
    assert not ended.close()


def test_a_job_that_ends_before_the_cores_are_open_starts_no_engine() -> None:
    opened, started = threading.Event(), threading.Event()

    def wait() -> None:
        assert opened.wait(SOON_S)

    def start() -> Any:
        started.set()

    ended = LeasedJob(pb.Holder(), 2, "", 100, start, 3.0, "key", wait_until_open=wait)
    # The cores go to the next job, which waits until they are open.
    assert ended.close()
    opened.set()
    with pytest.raises(PjrtError, match="the job's launcher has gone"):
        ended._engine.result(SOON_S)
    assert not started.is_set()
