"""What a job keeps on the worker is there for the next one. Real workers, processes and sockets."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from polyxla import UsageError
from polyxla.plugin import snapshot
from polyxla_testing.processes import wait_until
from polyxla_xrt import env, own_assignment
from polyxla_xrt.client.lease import Lease
from polyxla_xrt.config.assignment import Assignment
from polyxla_xrt.config.resuming import read_resuming
from polyxla_xrt.errors import WorkerError
from polyxla_xrt.keeping import keep, kept
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.proto import worker_pb2_grpc
from polyxla_xrt.protocol.worker import PROTOCOL
from polyxla_xrt.server.worker.keeping import MAX_NAMES, Keeper, KeptFile

SOON_S = 20.0
STATE = {"step": 7, "model": {"weight": torch.arange(6.0).reshape(2, 3), "names": ["a", "b"]}}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a context manager within which this process has a job on a worker."""

    @contextmanager
    def begin(worker: Any, name: str = "mine", ordinal: int = 0) -> Iterator[Lease]:
        monkeypatch.setenv(env.POLYXLA_XRT_JOB, name)
        resuming = read_resuming(snapshot())
        with closing(Lease(worker.address, 1, snapshot(), wait_s=SOON_S, resuming=resuming)) as lease:
            assignment = Assignment(worker.address, lease.job, (0,), "TPU", ordinal, 1, 0, 1)
            monkeypatch.setattr(own_assignment._own, "assignment", assignment)
            yield lease
        worker.wait_until_free()

    return begin


def same(found: Any, expected: Any = STATE) -> bool:
    weight = expected["model"]["weight"]
    rest = {**found, "model": {**found["model"], "weight": None}}
    return torch.equal(found["model"]["weight"], weight) and rest == {
        **expected,
        "model": {**expected["model"], "weight": None},
    }


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--jobs", "2")], ids=["alone", "shared"])
def test_the_next_job_of_the_same_name_gets_it(
    start_worker: Callable[..., Any], job: Callable[..., Any], options: tuple[str, ...]
) -> None:
    worker = start_worker("--keep", "60", *options)
    with job(worker):
        assert kept("state") is None
        keep("state", {"step": 0})
        keep("state", STATE)
        keep("large", torch.ones(1 << 20))
        assert same(kept("state"))
    with job(worker, "another"):
        assert kept("state") is None
    with job(worker):
        assert same(kept("state"))
        assert torch.equal(kept("large"), torch.ones(1 << 20))
        assert kept("nothing") is None


def test_only_ordinal_0_keeps(start_worker: Callable[..., Any], job: Callable[..., Any]) -> None:
    worker = start_worker("--keep", "60")
    with job(worker, ordinal=1):
        keep("state", STATE)
        assert kept("state") is None


def test_it_outlives_the_process_of_the_worker(
    start_worker: Callable[..., Any], job: Callable[..., Any]
) -> None:
    worker = start_worker("--keep", "60")
    with job(worker):
        keep("state", STATE)
        keep("other", {"step": 1})
        os.kill(worker.serving_pid, signal.SIGKILL)
    with job(worker):
        assert same(kept("state"))
        keep("other", {"step": 2})
        os.kill(worker.serving_pid, signal.SIGKILL)
    with job(worker):
        assert same(kept("state"))
        assert kept("other") == {"step": 2}


def test_a_job_that_outlives_its_worker_keeps_and_finds(
    start_worker: Callable[..., Any], job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.POLYXLA_XRT_RESUME, "40")
    worker = start_worker("--keep", "60")
    with job(worker):
        keep("state", STATE)
        os.kill(worker.serving_pid, signal.SIGKILL)
        # A thread of the lease gets the cores again.
        assert same(kept("state"))
        os.kill(worker.serving_pid, signal.SIGKILL)
        keep("other", {"step": 2})
        assert kept("other") == {"step": 2}


@pytest.mark.slow
def test_it_is_freed_in_time(start_worker: Callable[..., Any], job: Callable[..., Any]) -> None:
    worker = start_worker("--keep", "2")
    with job(worker):
        keep("state", STATE)
        (during,) = worker.status()["kept"]
        # The supervisor has it, and the process that serves.
        wait_until(lambda: kept_files(worker) == 2, "two files")
        time.sleep(2.5)
        # The time begins with the end of the job.
        assert same(kept("state"))
    (after,) = worker.status()["kept"]
    assert (during["name"], during["bytes"], during["user"]) == (after["name"], after["bytes"], after["user"])
    assert "left_s" not in during
    assert 0 < after["left_s"] <= 2
    wait_until(lambda: not worker.status()["kept"] and not kept_files(worker), "no files", SOON_S)
    with job(worker):
        assert kept("state") is None


def test_many_jobs_of_one_owner_leave_no_threads() -> None:
    freed: list[str] = []
    keeper = Keeper(1.0, 1 << 20, {}, lambda file, number: None if number else freed.append(file.name))
    threads = threading.active_count()
    for number in range(50):
        keeper.begin("owner")
        keeper.put(KeptFile("owner", f"name {number}", b""), 1, iter([b"x"]))
        keeper.end("owner")
    assert threading.active_count() <= threads
    wait_until(lambda: len(freed) == 50, "the end of the time", SOON_S)
    assert keeper.describe() == []


def kept_files(worker: Any) -> int:
    """Return the number of files of memory that the processes of a worker have."""
    found = 0
    for pid in (worker.process.pid, worker.serving_pid):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            # It may be closed just now.
            with suppress(FileNotFoundError):
                found += "polyxla-kept" in str(link.readlink())
    return found


def test_the_status_command_prints_what_is_kept(
    start_worker: Callable[..., Any], job: Callable[..., Any]
) -> None:
    worker = start_worker("--keep", "60")
    with job(worker):
        keep("state", torch.ones(1 << 18))
    command = [sys.executable, "-m", "polyxla", "worker", "status", worker.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOON_S, check=True)
    assert "\nkept         state of " in done.stdout
    assert ": 1.0 MiB, freed in " in done.stdout


def test_what_does_not_fit_is_refused_and_changes_nothing(
    start_worker: Callable[..., Any], job: Callable[..., Any]
) -> None:
    worker = start_worker("--keep", "60", "--memory-per-job", "0.001")
    with job(worker):
        keep("state", STATE)
        with pytest.raises(
            WorkerError, match=r"jobs may keep 1 MiB on this worker, keep 0 MiB, and this one requ"
        ):
            keep("state", torch.ones(1 << 19))
        with pytest.raises(WorkerError, match="a name has 1 to 300 characters"):
            keep("x" * 301, STATE)
        assert same(kept("state"))
        for number in range(MAX_NAMES - 1):
            keep(f"number {number}", number)
        with pytest.raises(WorkerError, match=f"a job may keep {MAX_NAMES} names"):
            keep("one more", STATE)
        assert same(kept("state"))


def test_what_is_on_its_way_takes_room(start_worker: Callable[..., Any], job: Callable[..., Any]) -> None:
    worker = start_worker("--keep", "60", "--memory-per-job", "0.001")
    size, ends = 600_000, threading.Event()

    def requests(key: str) -> Iterator[pb.KeepRequest]:
        yield pb.KeepRequest(protocol=PROTOCOL, job=key, name="first", size=size, data=bytes(size // 2))
        assert ends.wait(SOON_S)
        yield pb.KeepRequest(data=bytes(size // 2))

    with job(worker) as lease, grpc.insecure_channel(worker.address) as channel:
        coming = worker_pb2_grpc.WorkerStub(channel).Keep.future(requests(lease.job))
        wait_until(lambda: kept_files(worker) == 1, "the first half")
        with pytest.raises(
            WorkerError, match=r"jobs may keep 1 MiB on this worker, keep 1 MiB, and this one"
        ):
            keep("second", torch.ones(size // 4))
        ends.set()
        coming.result(SOON_S)
        keep("first", STATE)
        # A broken transfer takes no room any more.
        broken = pb.KeepRequest(protocol=PROTOCOL, job=lease.job, name="broken", size=size)
        with pytest.raises(grpc.RpcError, match="there are not 600000 bytes"):
            worker_pb2_grpc.WorkerStub(channel).Keep(iter([broken]))
        keep("second", torch.ones(size // 4))
        assert same(kept("first"))


@pytest.mark.parametrize(
    ("size", "data", "says"),
    [(10, b"short", "there are not 10 bytes"), (3, b"too long", "there are not 3 bytes")],
    ids=["short", "long"],
)
def test_a_broken_transfer_leaves_what_was_there(
    start_worker: Callable[..., Any], job: Callable[..., Any], size: int, data: bytes, says: str
) -> None:
    worker = start_worker("--keep", "60")
    with job(worker) as lease:
        keep("state", STATE)
        # The supervisor gets it a moment later.
        wait_until(lambda: kept_files(worker) == 2, "two files")
        with grpc.insecure_channel(worker.address) as channel:
            requests = [
                pb.KeepRequest(protocol=PROTOCOL, job=lease.job, name="state", size=size),
                pb.KeepRequest(data=data),
            ]
            with pytest.raises(grpc.RpcError, match=says):
                worker_pb2_grpc.WorkerStub(channel).Keep(iter(requests))
        assert same(kept("state"))
        wait_until(lambda: kept_files(worker) == 2, "two files, and no more")


def test_what_a_holder_has_beside_its_names_is_neither_kept_nor_told(
    start_worker: Callable[..., Any],
) -> None:
    worker = start_worker("--keep", "60")
    # Field 15 does not exist, and has 100,000 bytes.
    beside = b"\x7a\xa0\x8d\x06" + bytes(100_000)
    holder = pb.Holder.FromString(pb.Holder(user="u").SerializeToString() + beside)
    request = pb.LeaseRequest(protocol=PROTOCOL, cores=1, holder=holder, job="1" * 32, owner="2" * 64)
    assert request.ByteSize() > len(beside)
    with grpc.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        lease = stub.Lease(request)
        assert next(lease).HasField("granted")
        stub.Keep(iter([pb.KeepRequest(protocol=PROTOCOL, job=request.job, name="n", size=1, data=b"x")]))
        wait_until(lambda: kept_files(worker) == 2, "two files")
        assert stub.Status(pb.StatusRequest()).ByteSize() < 1000
        lease.cancel()
    # The supervisor has taken it, and so the next process has it, too.
    os.kill(worker.serving_pid, signal.SIGKILL)
    wait_until(lambda: worker.status()["kept"], "the kept file")
    assert worker.process.poll() is None


class SlowWorker(worker_pb2_grpc.WorkerServicer):
    """A worker at the other end of a slow link; it takes a limited number of messages."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def Keep(self, requests: Iterator[pb.KeepRequest], context: Any) -> pb.KeepReply:  # noqa: N802
        for _ in itertools.islice(requests, self.limit):
            time.sleep(0.25)
        while self.limit < 100 and context.is_active():
            time.sleep(0.1)
        return pb.KeepReply()


@pytest.fixture
def keep_slowly(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Return a function that keeps 20 MiB on a worker that takes a limited number of messages."""
    monkeypatch.setattr("polyxla_xrt.keeping.KEEP_S", 2.5)
    monkeypatch.setenv(env.POLYXLA_XRT_JOB, "mine")
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    assignment = Assignment(f"127.0.0.1:{port}", "1" * 32, (0,), "TPU", 0, 1, 0, 1)
    monkeypatch.setattr(own_assignment._own, "assignment", assignment)

    def begin(limit: int) -> None:
        worker_pb2_grpc.add_WorkerServicer_to_server(SlowWorker(limit), server)
        server.start()
        keep("large", torch.zeros(5 << 20))

    yield begin
    server.stop(None).wait(SOON_S)


@pytest.mark.slow
def test_a_transfer_may_take_as_long_as_it_goes_on(keep_slowly: Callable[[int], None]) -> None:
    keep_slowly(100)


def test_a_transfer_that_does_not_go_on_is_an_error(keep_slowly: Callable[[int], None]) -> None:
    with pytest.raises(WorkerError, match=r"the worker at .* has taken nothing of 'large' for 2\.5 s"):
        keep_slowly(2)


def test_a_key_that_no_job_has_reads_nothing(
    start_worker: Callable[..., Any], job: Callable[..., Any]
) -> None:
    worker = start_worker("--keep", "60")
    with job(worker), grpc.insecure_channel(worker.address) as channel:
        keep("state", STATE)
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        request = pb.RecallRequest(protocol=PROTOCOL, job="0" * 32, name="state")
        with pytest.raises(grpc.RpcError, match="there is no such job on this worker"):
            next(stub.Recall(request))
        request = pb.RecallRequest(protocol=PROTOCOL - 1, job="0" * 32, name="state")
        with pytest.raises(grpc.RpcError, match="the client speaks protocol"):
            next(stub.Recall(request))


def test_a_worker_that_keeps_nothing_says_so(
    start_worker: Callable[..., Any], job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start_worker()
    with job(worker):
        for call in (lambda: keep("state", STATE), lambda: kept("state")):
            with pytest.raises(UsageError, match="the worker keeps nothing") as refused:
                call()
            assert "Start it with --keep SECONDS" in str(refused.value)
        monkeypatch.delenv(env.POLYXLA_XRT_JOB)
        with pytest.raises(UsageError, match="a job without a name keeps nothing"):
            keep("state", STATE)
