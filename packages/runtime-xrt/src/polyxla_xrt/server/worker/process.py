"""The worker's serving process: gRPC, health checks and metrics, until it is stopped or must be replaced."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError
from polyxla_xrt.config.addresses import join_address
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol import bulk_decoding
from polyxla_xrt.protocol.channels import server_options
from polyxla_xrt.protocol.worker import OPTIONS, SERVICE
from polyxla_xrt.server.refusals import MalformedRequests
from polyxla_xrt.server.worker.keeping import Keeper
from polyxla_xrt.server.worker.leases import MAX_WAITING
from polyxla_xrt.server.worker.platforms.cpu import CpuEngines
from polyxla_xrt.server.worker.platforms.engines import JobEngines, Served
from polyxla_xrt.server.worker.platforms.library import Library
from polyxla_xrt.server.worker.platforms.plugin import PluginEngines, ReopenedEngines
from polyxla_xrt.server.worker.platforms.tpu_slice import SliceEngines
from polyxla_xrt.server.worker.security import Security
from polyxla_xrt.server.worker.service import LeasingServicer, WorkerServicer
from polyxla_xrt.server.worker.shared import ASK, BEGIN_S, MAX_LINE_BYTES, SharedServicer

LEAVE_S = 5.0
"""Longest wait for a job's calls to end after its error, in seconds; less than the supervisor's."""
REPLACE = 75
"""Exit code that asks the supervisor for a new serving process."""
UNOPENED = 76
"""Exit code that asks for a new process a moment later: the cores could not be opened again."""
SIGNAL_S = 1.0
"""Longest time until a signal takes effect, in seconds."""
SWITCH_INTERVAL_S = 1e-4
"""GIL switch interval, in seconds."""
_SPARE_CALLS = 32
_IDLE_POLL_S = 0.5

_log = logging.getLogger("polyxla.worker")


@dataclass(frozen=True)
class ServingOptions:
    """What to serve, and how.

    Attributes:
        address: ``host:port`` to listen on.
        security: the credentials.
        library: the plugin that has the cores; None for this machine's CPU.
        cores: number of cores; None for all that the plugin has, or the default of CPU cores.
        memory_limit_bytes: limit of a job's arrays; None for the memory of the cores.
        metrics_address: ``host:port`` for Prometheus; None for no metrics.
        idle_exit_s: exit after this many seconds without a job; None to stay.
        max_jobs: the most jobs that may hold cores at once; several have a process each.
        job_ports: the ports at which these processes may listen; 0 for any free one.
        keep_s: how long to keep what a job has kept after its end, in seconds; None to keep nothing.
        only: key of the job whose process this is; None for a worker.
        started: when the worker was started, on `time.monotonic`'s clock.
    """

    address: str
    security: Security
    library: Library | None = None
    cores: int | None = None
    memory_limit_bytes: int | None = None
    metrics_address: str | None = None
    idle_exit_s: float | None = None
    max_jobs: int = 1
    job_ports: Sequence[int] = (0,)
    keep_s: float | None = None
    only: str | None = None
    started: float = field(default_factory=time.monotonic)

    def limit_bytes(self, served: Served) -> int:
        """Return the limit of a job's arrays on these cores."""
        return self.memory_limit_bytes or served.memory_bytes


def open_engines(
    serving: ServingOptions, environ: Mapping[str, str], before: Served | None = None
) -> JobEngines:
    """Open the cores in this process, which keeps them until it ends.

    Args:
        serving: what to serve.
        environ: this process's environment.
        before: what the process that this one replaces has served; None for the first one.

    Raises:
        UsageError: they cannot be opened, or there are fewer; only in the first process.
    """
    library = serving.library
    if library is None:
        # CPU cores open at once, so a replacement need not open them in the background.
        return CpuEngines(serving.cores, environ)

    def open_cores(cores: int | None) -> PluginEngines:
        if library.members:
            return SliceEngines(library, library.members, cores, environ, serving.security)
        return PluginEngines(library, cores, environ)

    # The first process fails if the cores do not open, because its user still waits. A replacement listens
    # first: clients give up after seconds, and a TPU takes longer.
    if before is None:
        return open_cores(serving.cores)
    return ReopenedEngines(library, before, lambda: open_cores(before.cores), lambda: end_with(UNOPENED))


def serve(
    serving: ServingOptions,
    engines: JobEngines,
    ready: Callable[[int], object],
    fork: Callable[[ServingOptions], socket.socket] | None = None,
    line: socket.socket | None = None,
    keeper: Keeper | None = None,
) -> int:
    """Serve until the end; return the exit code. Runs in the main thread of the serving process.

    Args:
        serving: how to serve.
        engines: the cores.
        ready: called with the port when clients can connect.
        fork: starts the process of a job, and returns the line to it; None if this process serves the jobs.
        line: the line to the process that granted the cores of this one; None in that process.
        keeper: keeps what jobs want to keep; None to keep nothing.
    """
    ended = threading.Event()
    codes: list[int] = []

    def end(code: int) -> None:
        # The code comes before the event, which lets the main thread read it. Later codes are ignored.
        codes.append(code)
        ended.set()

    # Threads that need the GIL for microseconds hand it over at every array and every program.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # From here on, SIGTERM ends the running job with a reason, instead of killing the process.
    signal.signal(signal.SIGTERM, lambda *_: end(0))
    limit = serving.limit_bytes(engines.served)
    servicer: LeasingServicer[Any]
    if fork:
        servicer = SharedServicer(
            engines,
            serving.max_jobs,
            serving.job_ports,
            serving.started,
            lambda request, port: fork(_of_one_job(serving, engines.served, request, port)),
            lambda: end(0),
            keeper,
        )
    else:
        alone = servicer = WorkerServicer(
            engines, limit, serving.started, lambda: end(REPLACE), lambda: end(0), serving.only, keeper
        )
        # This needs a thread of its own: `lose_cores` sleeps, and the thread of the link must not wait.
        engines.lost.add_done_callback(
            lambda lost: threading.Thread(target=alone.lose_cores, args=(lost.result(),), daemon=True).start()
        )
    server, port = _server(serving, servicer, engines.served.cores)
    if serving.metrics_address:
        from polyxla_xrt.server.worker import metrics

        metrics.start(serving.metrics_address, servicer.status)
    if serving.idle_exit_s is not None:
        threading.Thread(target=_watch_idle, args=(servicer, serving.idle_exit_s, end), daemon=True).start()
    server.start()
    # Clients can connect now, so the supervisor may close the connections that still wait in the sockets of
    # the last process.
    ready(port)
    if line:
        threading.Thread(target=_answer, args=(line, servicer, end), name="polyxla-line", daemon=True).start()
    # A signal that arrives just before the wait does not interrupt it.
    while not ended.wait(SIGNAL_S):
        pass
    if servicer.leases.jobs:
        # This process ends before the job's engine is closed, and with it the log of the lease's return.
        _log.info("ending %d job(s): the worker was stopped", len(servicer.leases.jobs))
    # The grace lets the calls of the jobs carry the reason to their processes before they are cut.
    servicer.stop(PjrtError(Code.UNAVAILABLE, f"the worker at {serving.address} was stopped"), LEAVE_S)
    if codes[0] == REPLACE:
        # Its job has been notified before. The server is not stopped: that would end the listening sockets,
        # in which the supervisor lets connections wait for the successor.
        return REPLACE
    server.stop(LEAVE_S).wait(LEAVE_S)
    return codes[0]


def _of_one_job(
    serving: ServingOptions, served: Served, request: pb.LeaseRequest, port: int
) -> ServingOptions:
    """Return how a job's own process serves; the memory of the cores is shared by their number."""
    host = serving.address.rpartition(":")[0].strip("[]")
    return replace(
        serving,
        address=join_address(host, port),
        cores=request.cores,
        memory_limit_bytes=serving.memory_limit_bytes or served.memory_bytes * request.cores // served.cores,
        metrics_address=None,
        idle_exit_s=BEGIN_S,
        max_jobs=1,
        keep_s=None,
        only=request.job,
    )


def _answer(line: socket.socket, servicer: LeasingServicer[Any], end: Callable[[int], None]) -> None:
    """Describe the job of this process whenever it is asked to, and end with the line."""
    with contextlib.suppress(OSError):
        while message := line.recv(MAX_LINE_BYTES):
            if message == ASK:
                line.send(servicer.status().SerializeToString())
                continue
            why = pb.Failure.FromString(message)
            servicer.stop(PjrtError(why.code, why.message), 0.0)
    servicer.stop(PjrtError(Code.UNAVAILABLE, "the process that granted the job's cores has ended"), 0.0)
    end(0)


def _server(serving: ServingOptions, servicer: LeasingServicer[Any], cores: int) -> tuple[Any, int]:
    """Return a server that listens, and its port."""
    # A lease, a waiting lease and a session each occupy a thread for their whole life.
    threads = cores + MAX_WAITING + _SPARE_CALLS
    server = grpc.server(
        ThreadPoolExecutor(threads, thread_name_prefix="polyxla-call"),
        interceptors=[*serving.security.interceptors(), MalformedRequests()],
        # The supervisor holds the port of a worker, and each serving process shares it.
        options=(*OPTIONS, ("grpc.so_reuseport", int(serving.only is None)), *server_options(threads)),
        # A call beyond this limit fails at once: queued inside gRPC, it would hang without a reason.
        maximum_concurrent_rpcs=threads,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, _handlers(servicer)),))
    checker = health.HealthServicer()
    # In the health protocol, the empty name stands for the whole server.
    for name in ("", SERVICE):
        checker.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    return server, serving.security.listen(server, serving.address)


def _handlers(servicer: LeasingServicer[Any]) -> dict[str, Any]:
    """Return the handlers that protoc would generate, except that a session's bulk data is not copied."""
    return {
        "Lease": grpc.unary_stream_rpc_method_handler(
            servicer.Lease, pb.LeaseRequest.FromString, pb.LeaseReply.SerializeToString
        ),
        "Session": grpc.stream_stream_rpc_method_handler(servicer.Session, bulk_decoding.commands),
        "Keep": grpc.stream_unary_rpc_method_handler(
            servicer.Keep, pb.KeepRequest.FromString, pb.KeepReply.SerializeToString
        ),
        "Recall": grpc.unary_stream_rpc_method_handler(
            servicer.Recall, pb.RecallRequest.FromString, pb.RecallReply.SerializeToString
        ),
        "Status": grpc.unary_unary_rpc_method_handler(
            servicer.Status, pb.StatusRequest.FromString, pb.StatusReply.SerializeToString
        ),
        "Drain": grpc.unary_unary_rpc_method_handler(
            servicer.Drain, pb.DrainRequest.FromString, pb.StatusReply.SerializeToString
        ),
    }


def _watch_idle(servicer: LeasingServicer[Any], idle_exit_s: float, end: Callable[[int], None]) -> None:
    while True:
        time.sleep(_IDLE_POLL_S)
        leases = servicer.leases
        if not leases.jobs and not leases.waiting and time.monotonic() - leases.idle_since > idle_exit_s:
            _log.info("exiting: no job for %g s", idle_exit_s)
            end(0)
            return


def end_with(code: int) -> NoReturn:
    """End this process at once: the engine's threads may be in C++ code that cannot be interrupted."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
