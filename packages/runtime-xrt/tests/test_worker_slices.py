"""The workers of a TPU slice: one libtpu client over two emulated hosts, replaced together."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla import UsageError
from polyxla.plugin import free_addresses, snapshot
from polyxla_bridge.programs.executable import ArrayType
from polyxla_xrt.client.channel import WorkerChannel
from polyxla_xrt.client.engine import RemoteEngine
from polyxla_xrt.client.lease import Lease, Pod
from polyxla_xrt.config.assignment import Assignment
from polyxla_xrt.config.workers import Worker
from polyxla_xrt.errors import WorkerError
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol.worker import PROTOCOL
from polyxla_xrt.server.worker.platforms import slice_link, tpu_host
from polyxla_xrt.server.worker.platforms.library import SliceMembers
from polyxla_xrt.server.worker.platforms.slice_link import PORT, SliceLink
from polyxla_xrt.server.worker.security import Security

SECRET = "of one job"

Start = Callable[..., Any]
Join = Callable[..., SliceLink]
TIMEOUT_S = 60.0
HOSTS, EACH = 2, 4
CORES = HOSTS * EACH
OPTIONS = xla_client.CompileOptions().SerializeAsString()
SUM: bytes = hlo_module_from_text(f"""HloModule meet, replica_count={CORES}
add {{ a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }}
ENTRY main {{ x = f32[] parameter(0) ROOT r = f32[] all-reduce(x), replica_groups={{}}, to_apply=add }}
""").as_serialized_hlo_module_proto()
TOTAL = sum(range(1, CORES + 1))


def workers_of(*hosts: str) -> tuple[Worker, ...]:
    return tuple(Worker("w", task, host, 8470) for task, host in enumerate(hosts))


@pytest.fixture(scope="module")
def pod(share_worker: Start) -> list[Any]:
    """The workers of a v4-16, each on a host of its own."""
    hosts = free_addresses(HOSTS)
    listed = "|".join(map(str, workers_of(*hosts)))
    options = ("--platform", "tpu", "--devices", str(EACH), "--slice", listed)
    started = [
        share_worker(
            *options,
            "--address",
            f"{host}:8470",
            waits=False,
            POLYXLA_EMULATE="v4-16",
            POLYXLA_EMULATE_HOST=str(number),
        )
        for number, host in enumerate(hosts)
    ]
    assert [worker.address for worker in started] == [f"{host}:8470" for host in hosts]
    return started


class Job:
    """A job on the whole slice, with a process's part of the client for each core."""

    def __init__(self, pod: list[Any], stack: ExitStack, stall_timeout_s: float = 0.0) -> None:
        self.ended: list[Future[str]] = [Future() for _ in pod]
        self._pod = pod
        self.leases: list[Lease] = []
        for number, worker in enumerate(pod):
            coordinator = self.leases[0].coordinator if self.leases else ""
            ended = self.ended[number]

            def end(error: WorkerError, ended: Future[str] = ended) -> None:
                ended.set_result(str(error))

            lease = Lease(
                worker.address,
                EACH,
                snapshot(),
                wait_s=TIMEOUT_S,
                stall_timeout_s=stall_timeout_s,
                pod=Pod(HOSTS, number, worker.address.rpartition(":")[0], SECRET, coordinator),
                on_end=end,
            )
            self.leases.append(stack.enter_context(closing(lease)))
        pool = stack.enter_context(ThreadPoolExecutor(CORES))
        self.engines = list(pool.map(self._attach, range(CORES)))
        self.programs = list(pool.map(lambda engine: engine.compile(SUM, OPTIONS), self.engines))

    def _attach(self, ordinal: int) -> RemoteEngine:
        host, core = divmod(ordinal, EACH)
        worker, key = self._pod[host], self.leases[host].job
        assignment = Assignment(worker.address, key, (core,), "TPU", ordinal, CORES, ordinal, CORES)
        return RemoteEngine(assignment, snapshot())

    def add(self, ordinal: int) -> Future[memoryview]:
        """Add the ordinals in a collective, on one core."""
        engine = self.engines[ordinal]
        device = engine.devices[ordinal]
        own = memoryview(struct.pack("<f", ordinal + 1))
        argument = engine.from_host(device, ArrayType("float32", ()), own)
        (result,) = engine.execute(self.programs[ordinal], device, [argument])
        return engine.to_host(result)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


@contextmanager
def job_on(pod: list[Any], stall_timeout_s: float = 0.0) -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(pod, stack, stall_timeout_s)


def computes(pod: list[Any]) -> None:
    with job_on(pod) as job:
        sums = [job.add(ordinal) for ordinal in range(CORES)]
        found = [struct.unpack("<f", total.result(TIMEOUT_S))[0] for total in sums]
        job.close()
    assert found == CORES * [TOTAL]
    for worker in pod:
        worker.wait_until_free()


def test_replicas_of_all_hosts_meet_in_collectives_job_after_job(pod: list[Any]) -> None:
    serving = [worker.serving_pid for worker in pod]
    for _ in range(2):
        computes(pod)
    assert [worker.serving_pid for worker in pod] == serving


def test_the_workers_are_replaced_together_and_serve_the_next_job(pod: list[Any]) -> None:
    serving = [worker.serving_pid for worker in pod]
    with job_on(pod) as job:
        waiting = job.add(0)
        os.kill(serving[1], signal.SIGKILL)
        lost, gone = (ended.result(TIMEOUT_S) for ended in job.ended)
        with pytest.raises(Exception, match="worker 1 of the slice"):
            waiting.result(TIMEOUT_S)
    assert f"worker 1 of the slice, at {pod[1].address}, has ended its process" in lost
    assert f"the worker at {pod[1].address} is gone" in gone
    for worker, pid in zip(pod, serving, strict=True):
        worker.wait_until_replaced(pid)
    computes(pod)


@pytest.mark.long
def test_a_wedged_device_replaces_the_whole_slice(pod: list[Any]) -> None:
    serving = [worker.serving_pid for worker in pod]
    with job_on(pod) as job:
        # The program waits for the other cores, and nothing can stop it.
        job.add(CORES - 1)
        time.sleep(0.5)
    for worker, pid in zip(pod, serving, strict=True):
        worker.wait_until_replaced(pid)
    assert "a program of the job cannot be stopped" in pod[1].log
    computes(pod)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("returns", "problem"),
    [
        (False, "a replica is stuck: the other replicas do not join its collectives"),
        pytest.param(True, "a replica is stuck: it waits for one that has returned", marks=pytest.mark.long),
    ],
)
def test_a_replica_that_waits_for_another_host_is_named(pod: list[Any], returns: bool, problem: str) -> None:
    serving = [worker.serving_pid for worker in pod]
    with job_on(pod, 3.0 if not returns else 0.0) as job:
        if returns:
            job.engines.pop().close()
        for ordinal in range(CORES - 1):
            job.add(ordinal)
        ended = job.ended[0].result(TIMEOUT_S)
    assert problem in ended
    assert "replica 0: in meet with all-reduce" in ended
    for worker, pid in zip(pod, serving, strict=True):
        worker.wait_until_replaced(pid)
    computes(pod)


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (None, "part of a slice of 2 workers, and a job must have all of them: w;0;"),
        (Pod(3, 0, "127.0.0.1", SECRET), "part of a slice of 2 workers"),
        (
            Pod(2, 1, "127.0.0.1", SECRET, "127.0.0.1:1"),
            "this is worker 0 of its slice, and the job lists it as",
        ),
    ],
)
def test_a_job_that_is_not_the_slices_is_refused(pod: list[Any], part: Pod | None, problem: str) -> None:
    with pytest.raises(WorkerError, match=problem):
        Lease(pod[0].address, EACH, snapshot(), pod=part)


@pytest.fixture
def link() -> Iterator[Join]:
    """Joins a worker to its slice in this process, until the end of the test."""
    with ExitStack() as stack:

        def join(members: SliceMembers, join_s: float = TIMEOUT_S, token: Path | None = None) -> SliceLink:
            security = Security(token_file=token, is_insecure=token is None).with_token()
            link = SliceLink(members, security, {}, join_s)
            return stack.enter_context(closing(link))

        yield join


def test_missing_workers_are_named_to_those_who_wait(link: Join) -> None:
    workers = workers_of(*free_addresses(3))
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(link, SliceMembers(workers, own), 1.0) for own in (0, 2)]
        for answer in waiting:
            with pytest.raises(UsageError) as error:
                answer.result(TIMEOUT_S)
            assert f"worker 1 of the slice, at {workers[1].address} did not join within 1 s" in str(
                error.value
            )


def test_a_missing_first_worker_is_named(link: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_link, "MARGIN_S", 0.1)
    workers = workers_of(*free_addresses(2))
    with pytest.raises(UsageError, match=r"worker 0 of the slice, at .*, cannot be joined: .* refused"):
        link(SliceMembers(workers, 1), 0.5)


def test_another_list_of_workers_is_refused(link: Join) -> None:
    workers = workers_of(*free_addresses(2))
    other = workers_of(workers[0].host, "127.0.0.9")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(link, SliceMembers(workers, 0), 2.0)
        with pytest.raises(UsageError, match=r"worker 1 has the list of workers w;0.*127\.0\.0\.9"):
            link(SliceMembers(other, 1))
        with pytest.raises(UsageError, match="worker 1 of the slice"):
            first.result(TIMEOUT_S)


def test_joining_requires_the_workers_token(link: Join, tmp_path: Path) -> None:
    workers = workers_of(*free_addresses(2))
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(name * 4)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(link, SliceMembers(workers, 0), TIMEOUT_S, tmp_path / "right")
        with pytest.raises(UsageError, match="rejects this client: the token is wrong"):
            link(SliceMembers(workers, 1), TIMEOUT_S, tmp_path / "wrong")
        second = link(SliceMembers(workers, 1), TIMEOUT_S, tmp_path / "right")
        assert not first.result(TIMEOUT_S).lost.done()
        assert not second.lost.done()


def test_the_devices_of_all_workers_are_at_work_only_together(link: Join) -> None:
    workers = workers_of(*free_addresses(2))
    with ThreadPoolExecutor(2) as pool:
        links = list(pool.map(lambda own: link(SliceMembers(workers, own)), range(2)))
    second = links[1].progress("host:1")
    # Worker 0 does not know the job yet.
    assert not second.exchange(is_full=True)
    assert second.heartbeats() == {}
    first = links[0].progress("host:1")
    assert not first.exchange(is_full=True)
    assert second.exchange(is_full=True)
    assert first.exchange(is_full=True)
    assert not second.exchange(is_full=False)
    assert not first.exchange(is_full=True)


def test_heartbeats_and_returned_replicas_reach_the_other_workers_of_the_same_job(link: Join) -> None:
    workers = workers_of(*free_addresses(2))
    with ThreadPoolExecutor(2) as pool:
        links = list(pool.map(lambda own: link(SliceMembers(workers, own)), range(2)))
    first, second = (link.progress("host:1") for link in links)
    second.beat()
    second.retire(5)
    assert second.retired() == {5}
    second.exchange(is_full=False)
    first.exchange(is_full=False)
    assert (first.heartbeats(), first.retired()) == ({"0": "0", "1": "1"}, frozenset({5}))
    again = links[0].progress("host:2")
    # A late message of the last job must not count for this one.
    second.exchange(is_full=True)
    again.exchange(is_full=True)
    assert (again.heartbeats(), again.retired()) == ({"0": "0"}, frozenset())


def test_progress_is_taken_from_workers_of_the_slice_only(link: Join) -> None:
    workers = workers_of(*free_addresses(2))
    with ThreadPoolExecutor(2) as pool:
        links = list(pool.map(lambda own: link(SliceMembers(workers, own)), range(2)))
    other = WorkerChannel(f"{workers[0].host}:{PORT}", {})
    for worker in (0, 2):
        with pytest.raises(grpc.RpcError, match=f"there is no worker {worker}"):
            other.exchange(pb.Account(worker=worker), TIMEOUT_S)
    other.close()
    assert not any(link.lost.done() for link in links)


def test_a_worker_that_comes_again_has_lost_its_first_process(link: Join) -> None:
    workers = workers_of(*free_addresses(3))
    with ThreadPoolExecutor(3) as pool:
        links = list(pool.map(lambda own: link(SliceMembers(workers, own)), range(3)))
    again = WorkerChannel(f"{workers[0].host}:{PORT}", {})
    listed = "|".join(map(str, workers))
    with pytest.raises(grpc.RpcError) as error:
        list(again.join(pb.JoinRequest(protocol=PROTOCOL, workers=listed, worker=1)))
    again.close()
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    for cut in links:
        assert cut.lost.result(TIMEOUT_S).startswith(f"worker 1 of the slice, at {workers[1].address}")


def test_certificates_need_an_authority() -> None:
    security = Security(cert=Path("worker.pem"), key=Path("worker.key"))
    with pytest.raises(UsageError, match="Set POLYXLA_XRT_TLS_CA to the file"):
        security.as_client({})


def test_libtpu_gets_the_addresses_of_all_hosts() -> None:
    environ = {"POLYXLA_EMULATE": "v4-16", "POLYXLA_EMULATE_HOST": "1"}
    library = tpu_host.find_library({}, environ, workers_of("10.0.0.1", "10.0.0.2"))
    assert library.members is not None
    assert library.members.own == 1
    wanted = {
        "TPU_PROCESS_BOUNDS": "1,1,2",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
        "TPU_PROCESS_ADDRESSES": "10.0.0.1:8476,10.0.0.2:8476",
        "TPU_PROCESS_PORT": "8476",
        "TPU_VISIBLE_CHIPS": "0,1,2,3",
        "CLOUD_TPU_TASK_ID": "1",
    }
    assert {name: library.variables[name] for name in wanted} == wanted
    with pytest.raises(UsageError, match=r"is listed at 10\.0\.0\.2:8470, and listens on port 8471"):
        library.members.check(8471)


@pytest.mark.parametrize(
    ("environ", "hosts", "problem"),
    [
        ({"POLYXLA_EMULATE": "v4-16"}, 2, "not known which host .* Set POLYXLA_EMULATE_HOST"),
        ({"POLYXLA_EMULATE": "v4-16", "POLYXLA_EMULATE_HOST": "0"}, 3, r"2 host\(s\), the list 3 worker"),
        ({"POLYXLA_EMULATE": "v4-8"}, 1, r"1 host\(s\), the list 1 worker.*Omit it"),
    ],
)
def test_lists_that_do_not_fit_the_slice_are_refused(
    environ: Mapping[str, str], hosts: int, problem: str
) -> None:
    workers = workers_of(*(f"10.0.0.{number}" for number in range(hosts)))
    with pytest.raises(UsageError, match=problem):
        tpu_host.find_library({}, environ, workers)
