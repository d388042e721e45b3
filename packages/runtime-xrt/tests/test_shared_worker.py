"""A worker that serves several jobs at once, each in a process of its own."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla.plugin import snapshot
from polyxla_bridge.engine import memory_accounting
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.executable import ArrayType, Executable
from polyxla_testing.processes import wait_until
from polyxla_xrt import env
from polyxla_xrt.client.engine import RemoteEngine
from polyxla_xrt.client.lease import Lease
from polyxla_xrt.config.assignment import Assignment
from polyxla_xrt.config.resuming import read_resuming
from polyxla_xrt.errors import WorkerConnectError, WorkerError, WorkerHeldError
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.proto import worker_pb2_grpc
from polyxla_xrt.protocol.worker import PROTOCOL
from polyxla_xrt.server.worker import supervisor
from polyxla_xrt.server.worker.process import ServingOptions
from polyxla_xrt.server.worker.security import Security

WAIT_S = 40.0
SIZE = 1 << 16
VECTOR = ArrayType("float32", (SIZE,))
STEP = f"""HloModule step, input_output_alias={{ {{}}: (0, {{}}, may-alias) }}
ENTRY main {{
  w = f32[{SIZE}] parameter(0)
  s = f32[{SIZE}] sine(w)
  ROOT n = f32[{SIZE}] add(w, s)
}}"""
MEET = """HloModule meet, replica_count=2
add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }
ENTRY main { x = f32[] parameter(0) ROOT r = f32[] all-reduce(x), replica_groups={}, to_apply=add }"""


class Job:
    """A job that drives its cores from this process."""

    def __init__(self, address: str, cores: int = 1, wait_s: float = 0.0, **more: str) -> None:
        environ = snapshot() | more
        self.ended: Future[WorkerError] = Future()
        self.said: list[str] = []
        self.lease = Lease(
            address,
            cores,
            environ,
            wait_s=wait_s,
            resuming=read_resuming(environ),
            on_wait=self.said.append,
            on_end=self.ended.set_result,
        )
        try:
            ordinals = tuple(range(cores))
            whole = Assignment(address, self.lease.job, ordinals, "TPU", 0, cores, 0, 1)
            self.engine = RemoteEngine(whole, environ)
        except BaseException:
            self.lease.close()
            raise
        self.device = self.engine.devices[0]
        self.program = self.compiled(STEP)
        self.weights = self.engine.from_host(
            self.device, VECTOR, memoryview(struct.pack(f"<{SIZE}f", *range(SIZE)))
        )

    def compiled(self, text: str) -> Executable:
        options = xla_client.CompileOptions()
        options.num_replicas = len(self.engine.devices)
        module = hlo_module_from_text(text).as_serialized_hlo_module_proto()
        return self.engine.compile(module, options.SerializeAsString())

    def step(self) -> bytes:
        (self.weights,) = self.engine.execute(self.program, self.device, [self.weights])
        return bytes(self.engine.to_host(self.weights).result(WAIT_S))

    def close(self) -> None:
        self.engine.close()
        self.lease.close()


@pytest.fixture
def begin() -> Iterator[Callable[..., Job]]:
    """Return a function that begins a job, which ends with the test."""
    with ExitStack() as jobs:
        yield lambda *given, **more: jobs.enter_context(closing(Job(*given, **more)))


@pytest.fixture
def worker(start_worker: Callable[..., Any]) -> Any:
    """A worker of two cores for two jobs."""
    return start_worker("--jobs", "2")


def processes(worker: Any) -> list[int]:
    """Return the pids of a worker's processes without its supervisor: the one that grants cores is first."""
    pid = worker.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_two_jobs_compute_at_once_and_a_third_waits(worker: Any, begin: Callable[..., Job]) -> None:
    first, second = begin(worker.address), begin(worker.address)
    expected = first.step()
    assert second.step() == expected
    assert len(set(processes(worker))) == 3
    status = worker.status()
    assert (status["cores"], status["max_jobs"], status["jobs_served"]) == (2, 2, 2)
    for job in status["jobs"]:
        assert (job["pid"], job["cores"], job["sessions"]) == (os.getpid(), 1, 1)
        assert 4 * SIZE <= job["memory_bytes"] < 1 << 20
    with pytest.raises(WorkerHeldError, match=r"are held by .* since .*, and by .* since "):
        begin(worker.address)
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(begin, worker.address, wait_s=WAIT_S)
        wait_until(lambda: worker.status()["waiting"] == 1, "a waiting job", WAIT_S)
        first.close()
        assert third.result(WAIT_S).step() == expected
    assert "whose cores are held by" in third.result().said[0]


def test_each_job_has_its_own_budget(start_worker: Callable[..., Any], begin: Callable[..., Job]) -> None:
    worker = start_worker("--jobs", "2", "--memory-per-job", "0.001")
    first, second = begin(worker.address), begin(worker.address)
    too_much = ArrayType("float32", (300_000,))
    refused = first.engine.from_host(first.device, too_much, memoryview(bytes(1_200_000)))
    with pytest.raises(PjrtError, match=r"may hold 1 MiB of this worker's memory, holds 0 MiB"):
        first.engine.to_host(refused).result(WAIT_S)
    assert second.step()


def test_jobs_share_the_memory_by_their_cores(worker: Any) -> None:
    request = pb.LeaseRequest(protocol=PROTOCOL, cores=1, job="7" * 32)
    with grpc.insecure_channel(worker.address) as channel:
        moved = next(worker_pb2_grpc.WorkerStub(channel).Lease(request)).moved
    with grpc.insecure_channel(f"127.0.0.1:{moved.port}") as channel:
        granted = next(worker_pb2_grpc.WorkerStub(channel).Lease(request)).granted
    assert granted.memory_limit_bytes == memory_accounting.machine_bytes() // 2


def test_the_status_command_prints_each_job(worker: Any, begin: Callable[..., Job]) -> None:
    begin(worker.address), begin(worker.address)
    command = [sys.executable, "-m", "polyxla", "worker", "status", worker.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    found = re.findall(
        r"^job +\S+ \(pid (\d+), .*: 1 core\(s\), 1 process\(es\), 0 MiB$", done.stdout, re.MULTILINE
    )
    assert found == [str(os.getpid())] * 2, done.stdout


def test_the_loss_of_one_job_leaves_the_other_untouched(worker: Any, begin: Callable[..., Job]) -> None:
    lost, other = begin(worker.address), begin(worker.address)
    _, lost_pid, _ = processes(worker)
    is_over, found = threading.Event(), list[int]()

    def train() -> None:
        while not is_over.is_set():
            found.append(hash(other.step()))

    def wait_for_more(steps: int = 10) -> None:
        wanted = len(found) + steps
        wait_until(lambda: training.done() or len(found) >= wanted, "the other job's steps", WAIT_S)

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        try:
            wait_for_more()
            os.kill(lost_pid, signal.SIGKILL)
            assert f"the worker at {worker.address} is gone" in str(lost.ended.result(WAIT_S))
            with pytest.raises(PjrtError):
                lost.step()
            # Its core goes to the next job.
            following = begin(worker.address, wait_s=WAIT_S)
            wait_for_more()
        finally:
            is_over.set()
        training.result(WAIT_S)
    assert [hash(following.step()) for _ in found] == found
    assert lost_pid not in processes(worker)


def test_a_job_that_cannot_be_stopped_ends_with_its_process(
    start_worker: Callable[..., Any], begin: Callable[..., Job]
) -> None:
    worker = start_worker("--devices", "3", "--jobs", "2")
    other, stuck = begin(worker.address), begin(worker.address, 2)
    _, _, stuck_pid = processes(worker)
    program = stuck.compiled(MEET)
    one = stuck.engine.from_host(stuck.device, ArrayType("float32", ()), memoryview(struct.pack("<f", 1)))
    # The other replica never comes.
    stuck.engine.execute(program, stuck.device, [one])
    stuck.lease.close()
    wait_until(lambda: stuck_pid not in processes(worker), "the end of a job's process", WAIT_S)
    assert other.step()
    assert begin(worker.address, 2, wait_s=WAIT_S).step()


@pytest.mark.slow
def test_a_process_that_has_stopped_is_ended(
    begin: Callable[..., Job], start_worker: Callable[..., Any]
) -> None:
    worker = start_worker("--jobs", "2", impatience=(1, 2))
    other, stopped = begin(worker.address), begin(worker.address)
    _, _, pid = processes(worker)
    before = worker.status()["jobs"]
    os.kill(pid, signal.SIGSTOP)
    # Its state is the last that it told.
    assert (
        [job["sessions"] for job in worker.status()["jobs"]] == [job["sessions"] for job in before] == [1, 1]
    )
    assert "is gone" in str(stopped.ended.result(WAIT_S))
    wait_until(lambda: pid not in processes(worker), "the end of a job's process", WAIT_S)
    assert "a job's process has not answered for 6 s: ending it" in worker.log
    assert other.step() == begin(worker.address, wait_s=WAIT_S).step()


def test_a_job_goes_on_in_a_new_process(worker: Any, begin: Callable[..., Job]) -> None:
    resume = {env.POLYXLA_XRT_RESUME: "40"}
    other, job = begin(worker.address), begin(worker.address, **resume)
    expected = [other.step() for _ in range(30)]
    found = []
    for number in range(30):
        if number in (0, 7, 20):
            wait_until(lambda: len(processes(worker)) == 3, "the processes of two jobs", WAIT_S)
            os.kill(processes(worker)[-1], signal.SIGKILL)
        found.append(job.step())
    assert found == expected
    assert other.step() == job.step()


def test_jobs_end_with_the_process_that_granted_their_cores(worker: Any, begin: Callable[..., Job]) -> None:
    lost, job = begin(worker.address), begin(worker.address, **{env.POLYXLA_XRT_RESUME: "40"})
    expected = [lost.step() for _ in range(3)]
    assert job.step() == expected[0]
    os.kill(processes(worker)[0], signal.SIGKILL)
    assert "is gone: the process that granted the job's cores has ended" in str(lost.ended.result(WAIT_S))
    assert [job.step() for _ in range(2)] == expected[1:]
    assert begin(worker.address, wait_s=WAIT_S).step() == expected[0]


def test_jobs_that_end_at_once_are_both_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    supervised = supervisor._Supervisor(ServingOptions("127.0.0.1:0", Security()), {})
    children = [subprocess.Popen([sys.executable, "-c", ""]) for _ in range(2)]
    supervised._jobs = {child.pid for child in children}
    wait, waits = os.waitpid, itertools.count()

    def interrupted(pid: int, _: int) -> tuple[int, int]:
        found = wait(pid, 0)
        # The signal of the second child arrives while the first is waited for.
        if next(waits) == 0:
            supervised._reap()
        return found

    monkeypatch.setattr(os, "waitpid", interrupted)
    supervised._reap()
    assert supervised._jobs == set()
    for child in children:
        child.returncode = 0


@pytest.mark.slow
def test_a_process_that_has_stopped_ends_with_its_worker(worker: Any, begin: Callable[..., Job]) -> None:
    begin(worker.address)
    pid = processes(worker)[1]
    os.kill(pid, signal.SIGSTOP)
    worker.process.terminate()
    assert worker.process.wait(WAIT_S) == 0
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of a job's process", WAIT_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["sigterm", "ctrl-c"])
def test_a_stopped_worker_tells_every_job(
    worker: Any, begin: Callable[..., Job], number: signal.Signals
) -> None:
    jobs = [begin(worker.address), begin(worker.address)]
    pids = processes(worker)
    worker.process.send_signal(number)
    for job in jobs:
        assert f"the worker at {worker.address} was stopped" in str(job.ended.result(WAIT_S))
    assert worker.process.wait(WAIT_S) == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_drained_worker_ends_after_its_jobs(worker: Any, begin: Callable[..., Job]) -> None:
    jobs = [begin(worker.address), begin(worker.address)]
    subprocess.run(
        [sys.executable, "-m", "polyxla", "worker", "drain", worker.address], timeout=WAIT_S, check=True
    )
    assert all(job.step() for job in jobs)
    with pytest.raises(WorkerError, match="the worker is draining"):
        begin(worker.address)
    for job in jobs:
        assert worker.process.poll() is None
        job.close()
    assert worker.process.wait(WAIT_S) == 0


@pytest.mark.slow
def test_a_process_whose_client_does_not_come_returns_its_cores(
    start_worker: Callable[..., Any], begin: Callable[..., Job]
) -> None:
    worker = start_worker("--jobs", "2", impatience=(1, 3))
    with grpc.insecure_channel(worker.address) as channel:
        request = pb.LeaseRequest(protocol=PROTOCOL, cores=2, job="7" * 32, holder=pb.Holder(user="ann"))
        assert next(worker_pb2_grpc.WorkerStub(channel).Lease(request)).moved.port
    (job,) = worker.status()["jobs"]
    assert (job["user"], job["cores"], job["sessions"]) == ("ann", 2, 0)
    assert begin(worker.address, 2, wait_s=WAIT_S).step()


def test_a_jobs_process_serves_no_other_job(worker: Any) -> None:
    with closing(Lease(worker.address, 1, snapshot())) as lease:
        port = lease._channel._moved
        with grpc.insecure_channel(port) as channel:
            request = pb.LeaseRequest(protocol=PROTOCOL, cores=1, job="7" * 32)
            with pytest.raises(grpc.RpcError) as refused:
                next(worker_pb2_grpc.WorkerStub(channel).Lease(request))
        assert refused.value.details() == "this process serves another job"
        assert lease._channel.status().jobs


def test_a_job_that_has_begun_again_is_found_while_its_first_process_stays(worker: Any) -> None:
    request = pb.LeaseRequest(protocol=PROTOCOL, cores=1, job="7" * 32)
    attach = pb.Command(attach=pb.Attach(protocol=PROTOCOL, job=request.job, cores=[0]))
    with grpc.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        ports = [next(stub.Lease(request)).moved.port]
        first = processes(worker)[1]
        os.kill(first, signal.SIGSTOP)
        ports.append(next(stub.Lease(request)).moved.port)
        answers = next(stub.Session(iter([pb.Commands(commands=[attach])])))
        os.kill(first, signal.SIGCONT)
    assert ports[0] != ports[1]
    assert answers.answers[0].moved.port == ports[1]


def test_the_ports_of_jobs_can_be_chosen(start_worker: Callable[..., Any], begin: Callable[..., Job]) -> None:
    # Other suites on this machine search as well, so each begins elsewhere.
    ports = range(random.randrange(10_000, 29_000), 30_000)
    first = next(port for port in ports if _are_free(port, port + 1, port + 2))
    worker = start_worker("--jobs", "2", "--job-ports", f"{first}-{first + 2}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        jobs = [begin(worker.address), begin(worker.address)]
        assert {job.lease._channel._moved for job in jobs} == {f"127.0.0.1:{first + n}" for n in (1, 2)}
        jobs[0].close()
        taken.close()
        assert begin(worker.address, wait_s=WAIT_S).step()


def _are_free(*ports: int) -> bool:
    with ExitStack() as probes:
        try:
            for port in ports:
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_a_port_that_cannot_be_reached_is_named(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = Lease._connect
    monkeypatch.setattr("polyxla_xrt.client.lease.REPLACED_S", 0.0)
    # A port that is bound, and does not listen.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        monkeypatch.setattr(Lease, "_connect", lambda lease, address, _=0: connect(lease, address, port))
        with pytest.raises(WorkerConnectError) as caught:
            Lease(worker.address, 1, snapshot())
    nowhere = f"127.0.0.1:{port}"
    assert f"the worker at {worker.address} has moved the job to {nowhere}, which cannot be" in str(
        caught.value
    )
    assert "--job-ports FIRST-LAST" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--jobs", "2", "--job-ports", "8471"],
            "'8471' is no range of ports for 2 jobs with a process each",
        ),
        (["--jobs", "2", "--job-ports", "8471-8471"], "is no range of ports for 2 jobs"),
        (
            ["--jobs", "2", "--job-ports", "9-8"],
            "the first and the last port, such as 8471-8472, and --jobs.",
        ),
        (["--job-ports", "8471-8472"], "a worker of one job serves it at its own port"),
        (["--keep", "nan"], "less than or equal to 31536000"),
        (["--exit-when-idle", "inf"], "less than or equal to"),
        (["--memory-per-job", "inf"], "less than or equal to"),
        (["--jobs", "2", "--platform", "plugin=/no.so"], "--jobs 2 needs cores that several processes can"),
    ],
    ids=["one", "few", "none", "alone", "keep", "idle", "memory", "plugin"],
)
def test_options_that_do_not_fit_are_refused(options: list[str], message: str) -> None:
    command = [sys.executable, "-m", "polyxla", "worker", "--address", "127.0.0.1:0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
