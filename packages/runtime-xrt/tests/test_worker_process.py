"""`polyxla worker` as users run it: real processes and sockets, also when some of them die."""

from __future__ import annotations

import getpass
import json
import logging
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla.plugin import free_ports, snapshot
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.executable import ArrayType
from polyxla_xrt.client import session as client_session
from polyxla_xrt.client.channel import WorkerChannel
from polyxla_xrt.client.engine import RemoteEngine
from polyxla_xrt.client.lease import REPLACED_S, Lease
from polyxla_xrt.client.unanswered import MAX_IN_FLIGHT
from polyxla_xrt.config.assignment import Assignment
from polyxla_xrt.errors import WorkerHeldError, WorkerRefusedError
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.proto import worker_pb2_grpc
from polyxla_xrt.protocol.worker import PROTOCOL
from polyxla_xrt.server.worker import glibc_memory, logs, process, supervisor

PATIENCE_S = 40.0
SOON_S = 30.0
"""Time within which the worker notices that a client died, in seconds."""

DOUBLE = "HloModule double ENTRY main { x = f32[] parameter(0) ROOT y = f32[] add(x, x) }"

Start = Callable[..., Any]


def polyxla(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "polyxla", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def serves_a_job(worker: Any, client: Start) -> None:
    """Run a job of two processes that compute and say goodbye."""
    lease = client("lease", worker.address, "30")
    while isinstance(key := lease.read(), str) and key.startswith("waiting"):
        pass
    assert isinstance(key, str), key
    sessions = [client("session", worker.address, key, str(ordinal)) for ordinal in range(2)]
    for session in sessions:
        assert session.read() == "attached"
    assert [session.order("double") for session in sessions] == [42.0, 42.0]
    assert [session.order("leave") for session in sessions] == ["left", "left"]
    assert lease.order("close") == "closed"
    worker.wait_until_free()


def job_of_two(worker: Any, client: Start) -> tuple[Any, list[Any]]:
    lease = client("lease", worker.address, "0")
    key = lease.read()
    assert isinstance(key, str), key
    sessions = [client("session", worker.address, key, str(ordinal)) for ordinal in range(2)]
    for session in sessions:
        assert session.read() == "attached"
    return lease, sessions


def test_the_status_shows_the_job_that_is_served(worker: Any, client: Start) -> None:
    before = worker.status()
    assert before["jobs"] == []
    lease, sessions = job_of_two(worker, client)
    status = worker.status()
    (job,) = status.pop("jobs")
    assert job["pid"] == lease.process.pid
    assert (job["cores"], job["sessions"]) == (2, 2)
    assert job["user"] == getpass.getuser()
    assert job["host"] == socket.gethostname()
    assert abs(job["since"] - time.time()) < 60
    assert status["jobs_served"] == before["jobs_served"] + 1
    expected = {"cores": 2, "platform": "cpu", "protocol": PROTOCOL, "max_jobs": 1, "draining": False}
    assert {name: status[name] for name in expected} == expected
    assert [session.order("leave") for session in sessions] == ["left", "left"]
    lease.order("close")
    worker.wait_until_free()


def test_the_status_command_prints_text_or_json(worker: Any) -> None:
    status = json.loads(polyxla("worker", "status", worker.address, "--json").stdout)
    assert (status["cores"], status["jobs"]) == (2, [])
    with closing(Lease(worker.address, 1, snapshot())) as lease:
        assert lease.job
        text = polyxla("worker", "status", worker.address).stdout
    assert re.search(r"^cores +2$", text, re.MULTILINE)
    # XRT_WORKERS has addresses of this form.
    assert polyxla("worker", "status", f"grpc://{worker.address}").returncode == 0
    who = rf"{getpass.getuser()}@{socket.gethostname()} \(pid {os.getpid()}, .*\) since \d{{4}}-"
    assert re.search(rf"^job +{who}", text, re.MULTILINE), text
    worker.wait_until_free()


def test_a_job_may_have_an_argument_that_is_not_utf_8(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Python decodes the byte 0xe9 so.
    monkeypatch.setattr(sys, "argv", ["train.py", "cr\udce9.txt"])
    with closing(Lease(worker.address, 1, snapshot())):
        (job,) = worker.status()["jobs"]
        assert job["command"] == "train.py cr\\udce9.txt"
    worker.wait_until_free()


def test_the_exit_code_of_a_status_command_without_a_worker_is_1() -> None:
    done = polyxla("worker", "status", f"127.0.0.1:{free_ports(1)[0]}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Connection refused" in done.stderr


def test_the_standard_health_check_answers(worker: Any) -> None:
    with grpc.insecure_channel(worker.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "polyxla.xrt.worker.Worker"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=SOON_S)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=SOON_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_second_job_learns_who_holds_the_cores_and_may_wait(worker: Any, client: Start) -> None:
    first = client("lease", worker.address, "0")
    assert isinstance(first.read(), str)
    second = client("lease", worker.address, "0").read()
    assert second["error"] == "WorkerHeldError"
    who = (
        rf"held by {getpass.getuser()}@{socket.gethostname()} \(pid {first.process.pid}, .*\) since \d{{4}}-"
    )
    assert re.search(who, second["text"]), second
    third = client("lease", worker.address, "30")
    assert re.match(rf"waiting for the worker at {worker.address}, whose cores are {who}", third.read())
    worker.wait_until(lambda status: status["waiting"] == 1)
    first.order("close")
    assert re.fullmatch("[0-9a-f]{32}", third.read())
    assert third.order("close") == "closed"
    worker.wait_until_free()


def test_a_wait_for_the_cores_times_out(worker: Any, client: Start) -> None:
    first = client("lease", worker.address, "0")
    first.read()
    begin = time.monotonic()
    with pytest.raises(WorkerHeldError, match=f"pid {first.process.pid}"):
        Lease(worker.address, 2, snapshot(), wait_s=1.0)
    assert 1.0 <= time.monotonic() - begin < SOON_S
    first.order("close")
    worker.wait_until_free()


def test_a_killed_launcher_releases_the_cores(worker: Any, client: Start) -> None:
    lease, sessions = job_of_two(worker, client)
    begin = time.monotonic()
    lease.kill()
    for session in sessions:
        assert "the job's launcher has ended" in session.order("wait")
    worker.wait_until_free()
    assert time.monotonic() - begin < SOON_S
    serves_a_job(worker, client)


def test_a_killed_replica_is_named_to_the_others_and_the_worker_continues(worker: Any, client: Start) -> None:
    serving = worker.serving_pid
    lease, sessions = job_of_two(worker, client)
    sessions[1].kill()
    for connected in (sessions[0], lease):
        assert "ordinal 1 died" in connected.order("wait")
    worker.wait_until_free()
    assert worker.serving_pid == serving
    serves_a_job(worker, client)


@pytest.mark.slow
def test_a_program_that_waits_for_a_dead_replica_ends_with_its_process(worker: Any, client: Start) -> None:
    serving = worker.serving_pid
    lease, sessions = job_of_two(worker, client)
    assert sessions[0].order("stall") == "sent"
    time.sleep(0.5)
    sessions[1].kill()
    for connected in (sessions[0], lease):
        assert "ordinal 1 died" in connected.order("wait")
    worker.wait_until_replaced(serving)
    serves_a_job(worker, client)
    assert "a program of the job cannot be stopped: replacing this process" in worker.log


def answers(address: str) -> bool:
    """Return whether a worker answers a connection of its own, which a refused one would not survive."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=SOON_S):
        channel = WorkerChannel(address, snapshot())
        try:
            return channel.status(timeout_s=REPLACED_S).protocol == PROTOCOL
        finally:
            channel.close()


@pytest.mark.parametrize("is_wedged", [True, False], ids=["wedged", "killed"])
def test_no_connection_is_refused_while_the_process_is_replaced(
    worker: Any, client: Start, is_wedged: bool
) -> None:
    serving = worker.serving_pid
    _, sessions = job_of_two(worker, client)
    assert sessions[0].order("stall") == "sent"
    if is_wedged:
        time.sleep(0.5)
        sessions[1].kill()
    with ThreadPoolExecutor(21) as pool:
        # The next job's lease waits for the job that cannot be stopped.
        following = pool.submit(Lease, worker.address, 2, snapshot(), wait_s=SOON_S)
        if not is_wedged:
            os.kill(serving, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while Path(f"/proc/{serving}").exists():
            assert time.monotonic() < deadline, worker.log
        assert all(pool.map(answers, [worker.address] * 20))
        following.result(PATIENCE_S).close()
    worker.wait_until_free()


def test_closing_after_the_worker_is_lost_waits_for_no_answer(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, waited = start_worker(), []
    lease = Lease(worker.address, 1, snapshot())
    engine = RemoteEngine(Assignment(worker.address, lease.job, (0,), "TPU", 0, 1, 0, 1), {})
    os.kill(worker.serving_pid, signal.SIGKILL)
    # The first request may still be sent, and fail when the connection breaks; the second is not sent.
    for _ in range(2):
        with pytest.raises(PjrtError):
            engine.memory_stats(engine.devices[0])
    monkeypatch.setattr(client_session, "wait", lambda requests, _: waited.extend(requests))
    engine.close()
    lease.close()
    assert all(request.done() for request in waited)


def test_a_limited_number_of_executions_is_in_flight(worker: Any) -> None:
    with closing(Lease(worker.address, 1, snapshot())) as lease:
        engine = RemoteEngine(Assignment(worker.address, lease.job, (0,), "TPU", 0, 1, 0, 1), {})
        module = hlo_module_from_text(DOUBLE).as_serialized_hlo_module_proto()
        program = engine.compile(module, xla_client.CompileOptions().SerializeAsString())
        (device,) = engine.devices
        one = engine.from_host(device, ArrayType("float32", ()), memoryview(struct.pack("<f", 21)))
        # A stopped worker answers nothing until it continues.
        os.kill(worker.serving_pid, signal.SIGSTOP)
        try:
            for _ in range(MAX_IN_FLIGHT):
                (result,) = engine.execute(program, device, [one])
            assert (MAX_IN_FLIGHT, engine.session.executions.holdups) == (64, 0)
            with ThreadPoolExecutor(1) as pool:
                late = pool.submit(engine.execute, program, device, [one])
                with pytest.raises(TimeoutError):
                    late.result(0.3)
                os.kill(worker.serving_pid, signal.SIGCONT)
                (result,) = late.result(SOON_S)
        finally:
            os.kill(worker.serving_pid, signal.SIGCONT)
        assert engine.session.executions.holdups == 1
        assert struct.unpack("<f", engine.to_host(result).result(SOON_S)) == (42.0,)
        engine.close()
    worker.wait_until_free()


@pytest.mark.parametrize("key", ["", "0" * 32, "é", "x" * 1_000_000])
def test_a_wrong_key_finds_no_job(worker: Any, key: str) -> None:
    with closing(Lease(worker.address, 2, snapshot())):
        assert_not_found(worker.address, key)
    worker.wait_until_free()


def test_a_stale_key_finds_no_job(worker: Any) -> None:
    with closing(Lease(worker.address, 2, snapshot())) as lease:
        old = lease.job
    worker.wait_until_free()
    assert_not_found(worker.address, old)
    with closing(Lease(worker.address, 2, snapshot(), wait_s=SOON_S)):
        assert_not_found(worker.address, old)
    worker.wait_until_free()


def assert_not_found(address: str, key: str) -> None:
    attach = pb.Attach(protocol=PROTOCOL, job=key, cores=[0])
    code, details = refusal(address, attach)
    assert (code, details) == (grpc.StatusCode.NOT_FOUND, "there is no such job on this worker")


def refusal(address: str, attach: pb.Attach) -> tuple[grpc.StatusCode, str]:
    with grpc.insecure_channel(address) as channel:
        first = pb.Commands(commands=[pb.Command(attach=attach)])
        return refused(worker_pb2_grpc.WorkerStub(channel).Session(iter([first]), timeout=SOON_S))


def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    return caught.value.code(), caught.value.details()


@pytest.mark.parametrize(
    ("cores", "code", "says"),
    [
        ([], grpc.StatusCode.INVALID_ARGUMENT, "cores [] are not among the 1 of this job"),
        ([1], grpc.StatusCode.INVALID_ARGUMENT, "cores [1] are not among the 1"),
        ([0, 0], grpc.StatusCode.INVALID_ARGUMENT, "cores [0, 0] are not among the 1"),
    ],
)
def test_a_session_may_only_drive_its_jobs_cores(
    worker: Any, cores: list[int], code: grpc.StatusCode, says: str
) -> None:
    with closing(Lease(worker.address, 1, snapshot(), wait_s=SOON_S)) as lease:
        attach = pb.Attach(protocol=PROTOCOL, job=lease.job, cores=cores)
        found, details = refusal(worker.address, attach)
        assert found is code
        assert says in details
    worker.wait_until_free()


def test_two_processes_cannot_drive_one_core(worker: Any, client: Start) -> None:
    lease, sessions = job_of_two(worker, client)
    key = client("session", worker.address, "0" * 32, "0").read()
    assert key["error"] == "WorkerError"
    assert [session.order("leave") for session in sessions] == ["left", "left"]
    lease.order("close")
    with closing(Lease(worker.address, 2, snapshot(), wait_s=SOON_S)) as again:
        session = client("session", worker.address, again.job, "0")
        assert session.read() == "attached"
        code, details = refusal(worker.address, pb.Attach(protocol=PROTOCOL, job=again.job, cores=[0]))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert details == "another process of this job already drives cores [0]"
        assert session.order("leave") == "left"
        # Its core is free again for another process of the job.
        assert client("session", worker.address, again.job, "0").read() == "attached"
    worker.wait_until_free()


@pytest.mark.parametrize("protocol", [0, PROTOCOL + 1, 2**32 - 1])
def test_another_version_of_the_protocol_is_refused(worker: Any, protocol: int) -> None:
    served = worker.status()["jobs_served"]
    says = f"the client speaks protocol {protocol}, this worker {PROTOCOL}"
    code, details = refusal(worker.address, pb.Attach(protocol=protocol, cores=[0]))
    assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, says)
    assert lease_refusal(worker.address, protocol=protocol, cores=1) == (code, says)
    assert worker.status()["jobs_served"] == served


def lease_refusal(address: str, **request: Any) -> tuple[grpc.StatusCode, str]:
    with grpc.insecure_channel(address) as channel:
        asked = pb.LeaseRequest(**{"protocol": PROTOCOL, "job": "1" * 32, **request})
        return refused(worker_pb2_grpc.WorkerStub(channel).Lease(asked, timeout=SOON_S))


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({}, "the job requests 0 cores, but this worker has 2"),
        ({"cores": 3}, "the job requests 3 cores, but this worker has 2"),
        ({"cores": 1, "wait_s": -1.0}, "a timeout must be a non-negative number of seconds"),
        ({"cores": 1, "wait_s": float("nan")}, "a timeout must be a non-negative number of seconds"),
        ({"cores": 1, "wait_s": float("inf")}, "a timeout must be a non-negative number of seconds"),
        ({"cores": 1, "stall_timeout_s": float("nan")}, "a timeout must be a non-negative number of seconds"),
        ({"cores": 1, "holder": pb.Holder(command="x" * 100_000)}, "at most 300 characters each"),
        ({"cores": 1, "coordinator": "127.0.0.1:1"}, "worker of a single-worker job chooses the coordinator"),
        ({"cores": 1, "workers": 2, "worker": 2, "host": "h"}, "worker 2 of 2 at 'h' is invalid"),
        ({"cores": 1, "workers": 2}, "worker 0 of 2 at '' is invalid"),
        ({"cores": 1, "workers": 2, "worker": 1, "host": "h"}, "the first worker chooses the coordinator"),
        ({"cores": 1, "workers": 2, "host": "192.0.2.1"}, "must be an address of this worker"),
        ({"cores": 1, "workers": 2, "host": "\x00"}, "must be an address of this worker"),
        ({"cores": 1, "workers": 2, "host": "." * 300}, "must be an address of this worker"),
        (
            {"cores": 1, "workers": 2, "worker": 1, "host": "h", "coordinator": "nonsense"},
            "the coordinator is not host:port",
        ),
    ],
)
def test_an_invalid_lease_request_is_refused(worker: Any, request_: dict[str, Any], says: str) -> None:
    served = worker.status()["jobs_served"]
    code, details = lease_refusal(worker.address, **request_)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert says in details
    assert worker.status()["jobs_served"] == served


def test_a_holder_with_any_unicode_name_can_be_reported(worker: Any) -> None:
    name = "\U0001f600" * 300
    with grpc.insecure_channel(worker.address) as channel:
        holder = pb.Holder(host=name, user=name, command=name)
        request = pb.LeaseRequest(protocol=PROTOCOL, cores=1, holder=holder, job="2" * 32)
        call = worker_pb2_grpc.WorkerStub(channel).Lease(request, timeout=60)
        assert next(call).granted.platform == "cpu"
        code, details = lease_refusal(worker.address, cores=1)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details.startswith("the worker's cores are held by \U0001f600")
        call.cancel()
    worker.wait_until_free()


def test_a_protocol_violation_is_reported_to_the_client(worker: Any) -> None:
    with (
        closing(Lease(worker.address, 1, snapshot())) as lease,
        grpc.insecure_channel(worker.address) as channel,
    ):
        attach = pb.Attach(protocol=PROTOCOL, job=lease.job, cores=[0], ordinal=7)
        wrong = pb.Command(upload=pb.Upload(array=1, type=pb.ArrayType(dtype="thing")))
        commands = [pb.Commands(commands=[command]) for command in (pb.Command(attach=attach), wrong)]
        answers = list(worker_pb2_grpc.WorkerStub(channel).Session(iter(commands), timeout=60))
    says = "ordinal 7 violated the protocol: 'thing' is not a dtype of arrays"
    assert answers[-1].answers[0].ended.failure.message == says
    worker.wait_until_free()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["sigterm", "ctrl-c"])
def test_a_stopped_worker_notifies_its_clients(
    start_worker: Start, client: Start, number: signal.Signals
) -> None:
    worker = start_worker()
    lease, sessions = job_of_two(worker, client)
    worker.process.send_signal(number)
    for connected in (*sessions, lease):
        assert f"the worker at {worker.address} was stopped" in connected.order("wait")
    assert worker.process.wait(SOON_S) == 0


@pytest.mark.parametrize("options", [(), ("--jobs", "2")], ids=["alone", "shared"])
def test_a_job_that_waits_while_the_worker_stops_gets_the_cores_of_the_next(
    start_worker: Start, client: Start, options: tuple[str, ...]
) -> None:
    worker = start_worker(*options)
    assert isinstance(client("lease", worker.address, "0").read(), str)
    waiting = client("lease", worker.address, "60")
    assert waiting.read().startswith("waiting for the worker")
    worker.process.terminate()
    assert worker.process.wait(SOON_S) == 0
    after = start_worker("--address", worker.address, *options)
    key = waiting.read()
    assert isinstance(key, str), key
    assert [job["pid"] for job in after.status()["jobs"]] == [waiting.process.pid]


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.5])
def test_an_early_signal_ends_the_worker_and_no_other_process(after_s: float) -> None:
    """A supervisor that signalled pid 0 would end the other process of its group, too."""
    command = [sys.executable, "-m", "polyxla", "worker", "--address", "127.0.0.1:0", "--devices", "1"]
    beside = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, process_group=0)
    worker = subprocess.Popen(command, stderr=subprocess.PIPE, process_group=beside.pid)
    try:
        status = Path(f"/proc/{worker.pid}/status")
        deadline = time.monotonic() + 60
        # Before its handler is installed, the signal would simply kill the worker.
        while not catches(status, signal.SIGTERM):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(after_s)
        worker.terminate()
        assert worker.wait(SOON_S) == 0
        assert beside.poll() is None
    finally:
        for process in (worker, beside):
            process.kill()
            process.communicate()


def catches(status: Path, number: int) -> bool:
    mask = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


ENDED_IN_TIME = """
import signal, socket, subprocess, time
from polyxla_xrt.server.worker import supervisor

supervisor.STOP_S = 0.2
stopping = supervisor._Supervisor(None, {})
stopping._signals = socket.socketpair()
stopping._signals[1].setblocking(False)
signal.set_wakeup_fd(stopping._signals[1].fileno())
signal.signal(signal.SIGCHLD, stopping._reap)
child = subprocess.Popen(["sleep", "60"])
stopping._pid = child.pid
stopping._stop()
stopping._wait_for_end()
time.sleep(0.5)
print("still there")
"""


def test_a_serving_process_that_has_ended_is_not_killed_later() -> None:
    command = [sys.executable, "-c", ENDED_IN_TIME]
    # SIGKILL would end the group, which therefore must not be the one of this process.
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, start_new_session=True
    )
    assert (done.returncode, done.stdout) == (0, "still there\n"), done.stderr


@pytest.mark.slow
def test_the_serving_process_ends_with_its_supervisor_and_frees_the_port(
    start_worker: Start, client: Start
) -> None:
    worker = start_worker()
    serving = worker.serving_pid
    lease, sessions = job_of_two(worker, client)
    worker.process.kill()
    worker.process.wait()
    deadline = time.monotonic() + SOON_S
    while Path(f"/proc/{serving}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for connected in (*sessions, lease):
        assert "is gone" in connected.order("wait")
    serves_a_job(start_worker("--address", worker.address), client)


@pytest.mark.slow
def test_a_killed_serving_process_is_replaced(start_worker: Start, client: Start) -> None:
    worker = start_worker()
    lease, sessions = job_of_two(worker, client)
    killed = worker.serving_pid
    os.kill(killed, signal.SIGKILL)
    for connected in (*sessions, lease):
        assert "is gone" in connected.order("wait")
    worker.wait_until_replaced(killed)
    serves_a_job(worker, client)
    assert '"event": "replacing the serving process", "code": -9' in worker.log


def test_the_supervisor_gives_up_after_repeated_failed_starts(start_worker: Start) -> None:
    worker = start_worker()
    for _ in range(3):
        worker.status()
        os.kill(worker.serving_pid, signal.SIGKILL)
        time.sleep(0.3)
    assert worker.process.wait(SOON_S) == 1
    assert "the serving process failed 3 times in a row, last with -9" in worker.log


@pytest.mark.slow
def test_a_drained_worker_exits_after_its_job(start_worker: Start, client: Start) -> None:
    worker = start_worker()
    lease, sessions = job_of_two(worker, client)
    drained = polyxla("worker", "drain", worker.address, "--json")
    assert json.loads(drained.stdout)["draining"] is True
    second = client("lease", worker.address, "30").read()
    assert "the worker is draining: it takes no more jobs" in second["text"]
    assert [session.order("double") for session in sessions] == [42.0, 42.0]
    assert [session.order("leave") for session in sessions] == ["left", "left"]
    lease.order("close")
    assert worker.process.wait(SOON_S) == 0


@pytest.mark.slow
def test_a_drained_worker_exits_even_if_a_program_still_runs(start_worker: Start, client: Start) -> None:
    worker = start_worker()
    _, sessions = job_of_two(worker, client)
    assert sessions[0].order("stall") == "sent"
    time.sleep(0.5)
    polyxla("worker", "drain", worker.address)
    sessions[1].kill()
    assert "ordinal 1 died" in sessions[0].order("wait")
    assert worker.process.wait(2 * SOON_S) == 0


def test_draining_an_idle_worker_ends_it_at_once(start_worker: Start) -> None:
    worker = start_worker()
    assert re.search(r"^draining +True$", polyxla("worker", "drain", worker.address).stdout, re.MULTILINE)
    assert worker.process.wait(SOON_S) == 0


@pytest.mark.slow
def test_an_idle_worker_exits_after_its_timeout(start_worker: Start) -> None:
    worker = start_worker("--exit-when-idle", "2")
    with closing(Lease(worker.address, 1, snapshot())):
        time.sleep(3)
        assert worker.process.poll() is None
    assert worker.process.wait(SOON_S) == 0
    assert "exiting: no job for 2 s" in worker.log


def test_metrics_are_served_to_prometheus(start_worker: Start) -> None:
    where = f"127.0.0.1:{free_ports(1)[0]}"
    worker = start_worker("--metrics-address", where)

    def metrics() -> dict[str, float]:
        with urllib.request.urlopen(f"http://{where}/metrics", timeout=SOON_S) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, value in (line.split() for line in lines if line[0] != "#")}

    names = (
        "cores",
        "cores_held",
        "jobs_running",
        "sessions",
        "jobs_waiting",
        "array_bytes",
        "draining",
        "jobs_total",
    )
    assert metrics().keys() == {f"polyxla_worker_{name}" for name in names}
    assert metrics()["polyxla_worker_cores"] == 2
    assert metrics()["polyxla_worker_jobs_total"] == 0
    with closing(Lease(worker.address, 1, snapshot())):
        found = metrics()
        assert (found["polyxla_worker_cores_held"], found["polyxla_worker_jobs_total"]) == (1, 1)
        assert found["polyxla_worker_jobs_running"] == 1
    worker.wait_until_free()
    assert metrics()["polyxla_worker_cores_held"] == 0
    # The process that replaces it can bind the port of the metrics again.
    os.kill(worker.serving_pid, signal.SIGKILL)
    worker.wait_until(lambda status: status["up_s"] < SOON_S)
    assert metrics()["polyxla_worker_jobs_total"] == 0


@pytest.mark.slow
def test_the_workers_environment_decides_on_its_compilation_cache(
    start_worker: Start, client: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "programs"
    with monkeypatch.context() as patched:
        patched.setenv("POLYXLA_COMPILE_CACHE", str(cache))
        worker = start_worker()
    for _ in range(2):
        serves_a_job(worker, client)
    counts = rf"compilation cache: (\d+) hits, (\d+) misses \({re.escape(str(cache))}\)"
    (_, first), (hits, second) = re.findall(counts, worker.log)
    assert (first, second) == ("1", "0")
    assert int(hits) > 0
    assert len(list(cache.iterdir())) == 1


def test_the_allocator_is_set_before_any_thread_of_the_serving_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A thread that exists already keeps an arena of its own.
    order: list[str] = []
    for where, name in ((supervisor, "_end_with_supervisor"), (glibc_memory, "share_arena")):
        monkeypatch.setattr(where, name, lambda *_, name=name: order.append(name))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    ended = SystemExit("it does not return")
    monkeypatch.setattr(process, "end_with", lambda _: order.append("end_with"))
    serving: Any = SimpleNamespace(address="127.0.0.1:0")
    supervised = supervisor._Supervisor(serving, {})
    supervised._life = os.open(os.devnull, os.O_RDONLY)
    with pytest.raises(SystemExit):
        supervised._become(0, Mock(side_effect=ended))
    assert order == ["share_arena", "_end_with_supervisor", "end_with"]


def test_a_line_of_the_log_has_the_event_and_its_fields() -> None:
    event = {"holder": "root@vm (pid 7, a\nb.py)", "cores": 8}
    fields = {"msg": "lease granted", "created": 0.0, "levelname": "INFO", "event": event}
    record = logging.makeLogRecord(fields)
    when, _, text = logs._TextFormatter().format(record).partition(" polyxla worker: ")
    assert datetime.fromisoformat(when).timestamp() == 0
    assert text == "lease granted holder=root@vm (pid 7, a\\x0ab.py) cores=8"
    assert json.loads(logs._Json().format(record)) == {
        "time": "1970-01-01T00:00:00.000+00:00",
        "level": "info",
        "event": "lease granted",
        **event,
    }


@pytest.mark.parametrize("option", ["--address", "--metrics-address"])
def test_a_taken_port_is_a_usage_error(worker: Any, option: str) -> None:
    options = {"--address": "127.0.0.1:0", option: worker.address}
    done = polyxla("worker", *[word for pair in options.items() for word in pair])
    assert done.returncode == 2
    for text in (f"cannot listen on {worker.address}: Address already in use", option, "ss -ltnp"):
        assert text in " ".join(done.stderr.split())
    assert worker.status()["cores"] == 2


def test_an_address_of_another_host_is_a_usage_error() -> None:
    done = polyxla("worker", "--address", "192.0.2.1:8470", "--insecure")
    assert done.returncode == 2
    assert "cannot listen on 192.0.2.1:8470: Cannot assign requested address" in done.stderr


def test_a_job_cannot_exceed_its_memory_limit(start_worker: Start) -> None:
    worker = start_worker("--memory-per-job", "0.5")
    with (
        closing(Lease(worker.address, 1, snapshot())) as lease,
        grpc.insecure_channel(worker.address) as channel,
    ):
        big = pb.ArrayType(dtype="uint8", dims=[(1 << 29) + 1])
        commands = [
            pb.Command(attach=pb.Attach(protocol=PROTOCOL, job=lease.job, cores=[0])),
            pb.Command(upload=pb.Upload(array=1, type=big)),
            pb.Command(goodbye=pb.Goodbye()),
        ]
        commands[2:2] = [pb.Command(upload=pb.Upload(array=1, data=bytes(1 << 20))) for _ in range(512)]
        commands[-1:-1] = [
            pb.Command(upload=pb.Upload(array=1, data=b"x", ends=True)),
            pb.Command(download=pb.Download(request=1, array=1)),
        ]
        stub = worker_pb2_grpc.WorkerStub(channel)
        messages = (pb.Commands(commands=[command]) for command in commands)
        answers = [answer for some in stub.Session(messages, timeout=60) for answer in some.answers]
        failure = answers[-1].part.failure
        assert failure.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        who = f"the job of {getpass.getuser()}@{socket.gethostname()} (pid {os.getpid()}, "
        assert failure.message.startswith(who)
        assert "may hold 512 MiB of this worker's memory, holds 0 MiB, and requests 512.0" in failure.message
    assert worker.resident_bytes < 900 << 20


def test_a_client_refuses_a_worker_of_another_protocol_version(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyxla_xrt.client.channel.PROTOCOL", PROTOCOL + 1)
    with pytest.raises(
        WorkerRefusedError, match=f"speaks protocol {PROTOCOL} .*, this client {PROTOCOL + 1}"
    ):
        Lease(worker.address, 1, snapshot())
