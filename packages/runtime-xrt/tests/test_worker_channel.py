"""The client's connection to a worker: a real gRPC server on a socket of this machine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from polyxla_xrt.client.channel import WorkerChannel
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.proto import worker_pb2_grpc
from polyxla_xrt.protocol.worker import PROTOCOL


class ReplacedWorker(worker_pb2_grpc.WorkerServicer):
    """A worker whose process is replaced while it has the first call."""

    calls = 0

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:  # noqa: N802
        self.calls += 1
        if self.calls == 1:
            # gRPC answers so if a call reaches a server that is stopping.
            context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
        return pb.StatusReply(protocol=PROTOCOL, jobs_served=self.calls)


def test_a_call_that_the_workers_old_process_cannot_answer_is_repeated() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    worker_pb2_grpc.add_WorkerServicer_to_server(ReplacedWorker(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    channel = WorkerChannel(f"127.0.0.1:{port}", {})
    try:
        assert channel.status().jobs_served == 2
    finally:
        channel.close()
        server.stop(None).wait(10)
