"""The client's connection to a worker: a real gRPC server on a socket of this machine."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any

import grpc
import pytest

from polyxla_xrt.client import channel as channel_module
from polyxla_xrt.client import lease as lease_module
from polyxla_xrt.client.channel import WorkerChannel
from polyxla_xrt.client.lease import Lease
from polyxla_xrt.errors import WorkerConnectError
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.proto import worker_pb2_grpc
from polyxla_xrt.protocol.worker import PROTOCOL


@contextmanager
def served(worker: worker_pb2_grpc.WorkerServicer, port: int = 0) -> Iterator[int]:
    """Serve the calls of `worker`, at a port, which is yielded."""
    server = grpc.server(ThreadPoolExecutor(1))
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait(10)


@contextmanager
def channel_to(worker: worker_pb2_grpc.WorkerServicer) -> Iterator[WorkerChannel]:
    """A channel to a server with the calls of `worker`."""
    with served(worker) as port, closing(WorkerChannel(f"127.0.0.1:{port}", {})) as channel:
        yield channel


class ReplacedWorker(worker_pb2_grpc.WorkerServicer):
    """A worker whose process is replaced while it has the first call."""

    calls = leases = 0

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:  # noqa: N802
        self.calls += 1
        if self.calls == 1:
            # gRPC answers so if a call reaches a server that is stopping.
            context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
        return pb.StatusReply(protocol=PROTOCOL, jobs_served=self.calls, cores=1)

    def Lease(self, request: pb.LeaseRequest, context: Any) -> Iterator[pb.LeaseReply]:  # noqa: N802
        self.leases += 1
        if self.leases == 1:
            context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
        yield pb.LeaseReply(granted=pb.Granted(coordinator=f"of request {self.leases}"))


def test_a_call_that_the_workers_old_process_cannot_answer_is_repeated() -> None:
    with channel_to(ReplacedWorker()) as channel:
        assert channel.status().jobs_served == 2


def test_a_lease_that_the_workers_old_process_cannot_grant_is_asked_for_again() -> None:
    with channel_to(ReplacedWorker()) as channel, closing(Lease(channel.address, 1, {})) as lease:
        assert lease.coordinator == "of request 2"


class HeldWorker(ReplacedWorker):
    """A worker whose cores another job holds."""

    def Lease(self, request: pb.LeaseRequest, context: Any) -> Iterator[pb.LeaseReply]:  # noqa: N802
        yield pb.LeaseReply(held=pb.Held())
        while context.is_active():
            time.sleep(0.01)


def test_a_job_that_waits_for_a_worker_that_goes_away_waits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "REPLACED_S", 0.0)
    is_held = threading.Event()

    def ask(port: int) -> str:
        address = f"127.0.0.1:{port}"
        with closing(Lease(address, 1, {}, wait_s=60, on_wait=lambda _: is_held.set())) as lease:
            return lease.coordinator

    with ThreadPoolExecutor(1) as thread:
        with served(HeldWorker()) as port:
            asked = thread.submit(ask, port)
            assert is_held.wait(60)
        # It finds nobody, for longer than it would wait for a new process of the worker.
        time.sleep(1)
        with served(ReplacedWorker(), port):
            assert asked.result(60) == "of request 2"


class BusyWorker(worker_pb2_grpc.WorkerServicer):
    """A worker whose process imports what it needs, on a busy host, and so answers late."""

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:  # noqa: N802
        time.sleep(1)
        return pb.StatusReply(protocol=PROTOCOL, jobs_served=7)


def test_a_worker_that_is_alive_may_answer_late() -> None:
    with channel_to(BusyWorker()) as channel:
        assert channel.status(timeout_s=0.2).jobs_served == 7


def test_a_server_that_never_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "BUSY_S", 0.5)
    with channel_to(BusyWorker()) as channel, pytest.raises(WorkerConnectError, match="did not admit"):
        channel.status(timeout_s=0.2)


def carry_late(listener: socket.socket, port: int) -> None:
    """Carry one connection to a server whose host is busy when it begins."""
    client, _ = listener.accept()
    time.sleep(2)
    with client, socket.create_connection(("127.0.0.1", port)) as server:
        back = threading.Thread(target=carry, args=(server, client))
        back.start()
        carry(client, server)
        server.shutdown(socket.SHUT_RDWR)
        back.join(10)


def carry(here: socket.socket, there: socket.socket) -> None:
    with suppress(OSError):
        while data := here.recv(1 << 16):
            there.sendall(data)


def test_a_server_that_answers_late_is_waited_for() -> None:
    worker = ReplacedWorker()
    worker.calls = 1
    with served(worker) as port, socket.create_server(("127.0.0.1", 0)) as listener:
        carrier = threading.Thread(target=carry_late, args=(listener, port))
        carrier.start()
        with closing(WorkerChannel(f"127.0.0.1:{listener.getsockname()[1]}", {})) as channel:
            assert channel.call("Status", pb.StatusRequest(), timeout=60).cores == 1
        carrier.join(10)
        assert not carrier.is_alive()
