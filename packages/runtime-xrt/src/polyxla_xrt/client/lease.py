"""A job's lease on a worker's cores, which ends with the process that holds it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import grpc

from polyxla import UsageError
from polyxla.plugin import printable, shared_secret, snapshot
from polyxla_xrt.client.channel import WorkerChannel
from polyxla_xrt.client.job_owner import JobOwner
from polyxla_xrt.client.probe import RETRY_S
from polyxla_xrt.config.resuming import Resuming
from polyxla_xrt.config.variables import find
from polyxla_xrt.env import POLYXLA_XRT_JOB, TPU_NUM_DEVICES
from polyxla_xrt.errors import WorkerConnectError, WorkerError, WorkerHeldError, WorkerLostError
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol.worker import KEY_BYTES, PROTOCOL, SILENCE_S, format_jobs

TURN_S = 5.0
"""Longest wait for the cores of one of several workers, in seconds, before the next is tried."""
REPLACED_S = 20.0
"""How long a worker that has answered may then be without a process that serves, in seconds."""
UNNOTICED_S = SILENCE_S + 5.0
"""Longest time for which a worker may hold cores for a connection that is gone, in seconds."""
CLOSE_S = 2.0
"""Longest wait for the end of the call, in seconds."""

_log = logging.getLogger("polyxla.xrt")


@dataclass(frozen=True)
class Pod:
    """One worker of a job with several.

    Attributes:
        workers: number of workers of the job.
        worker: index of the worker that this lease is on.
        host: its host, as the other workers reach it.
        secret: known only to the job's workers.
        coordinator: ``host:port`` of the coordinator of the job's replicas; empty for the first worker, which
            chooses it.
    """

    workers: int
    worker: int
    host: str
    secret: str
    coordinator: str = ""


class Lease:
    """A lease on cores, from its creation until it is closed.

    Args:
        address: ``host:port`` of the worker.
        cores: number of its cores.
        environ: the environment to connect with.
        wait_s: longest wait for another job to release the cores, in seconds; 0 to fail at once.
        stall_timeout_s: longest wait of a replica in its collectives, in seconds.
        pod: this worker's part in a job of several workers; None for a single worker.
        owner: the process that owns the job; default: the current process.
        resuming: how the job goes on after the loss of its worker; None if that ends it.
        revive: called before each attempt to reach a worker again; it may start one.
        on_wait: receives a message that names the holder of the cores, and later what happens to the worker.
        on_end: receives the reason if the worker ends the job; called on a thread.

    Attributes:
        job: the job's key, for the job's own processes.
        coordinator: ``host:port`` of the coordinator of the job's replicas.

    Raises:
        WorkerError: the worker cannot be reached, refuses, or another job holds its cores.
        UsageError: the worker has fewer cores.
    """

    def __init__(
        self,
        address: str,
        cores: int,
        environ: Mapping[str, str],
        *,
        wait_s: float = 0.0,
        stall_timeout_s: float = 0.0,
        pod: Pod | None = None,
        owner: JobOwner | None = None,
        resuming: Resuming | None = None,
        revive: Callable[[], None] = lambda: None,
        on_wait: Callable[[str], None] = lambda _: None,
        on_end: Callable[[WorkerError], None] = lambda _: None,
    ) -> None:
        self._channel = WorkerChannel(address, environ)
        self._address, self._environ = address, environ
        self._resuming, self._revive = resuming, revive
        self._on_wait, self._on_end = on_wait, on_end
        self._closed = threading.Event()
        self._request = _request(cores, wait_s, stall_timeout_s, pod, owner or JobOwner.current())
        self._request.resumable = resuming is not None
        self._request.owner = _owner(environ)
        # The processes of the job know its key in advance, also for the next worker.
        self.job = self._request.job = secrets.token_hex(KEY_BYTES)
        try:
            granted = self._wait_for(self._request)
        except BaseException:
            self._channel.close()
            raise
        self.coordinator: str = granted.coordinator
        self._thread = threading.Thread(target=self._watch, name="polyxla-lease", daemon=True)
        self._thread.start()

    def _wait_for(self, request: pb.LeaseRequest) -> pb.Granted:
        """Request the cores, and repeat the request if the worker's process is replaced during the wait."""
        # The status comes first: its errors say what is wrong with the address or the version, and it has the
        # number of cores.
        found = self._channel.status()
        _check_cores(request.cores, found.cores, self._channel.address)
        started, wait_s = time.monotonic(), request.wait_s
        while True:
            try:
                reply = self._begin(request)
                if reply.WhichOneof("kind") == "moved":
                    self._connect(self._channel.address, reply.moved.port)
                    reply = self._begin(request)
            except WorkerConnectError:
                # The supervisor replaces a serving process that has failed, and the address answers again.
                if time.monotonic() - started >= max(wait_s, REPLACED_S):
                    raise
                # A process that is about to end answers, and grants nothing.
                time.sleep(RETRY_S)
            else:
                return reply.granted
            self._connect(self._channel.address)
            # This blocks until the new process answers, so that the request below reaches it. The user's
            # limit includes the time spent in the queue of the replaced process.
            self._channel.status(timeout_s=max(REPLACED_S, started + wait_s - time.monotonic()))
            # The cores may be held by the last request of this job, if the worker has not noticed the end of
            # its connection.
            request.wait_s = max(UNNOTICED_S, started + wait_s - time.monotonic())

    def _connect(self, address: str, port: int = 0) -> None:
        self._channel.close()
        self._channel = WorkerChannel(address, self._environ, port)

    def _begin(self, request: pb.LeaseRequest) -> pb.LeaseReply:
        """Begin the call, and wait until it has the cores, or is moved to a process of the job's own."""
        self._call = self._channel.call("Lease", request)
        try:
            # The loop ends with the grant and leaves the call open: the call itself is the lease, and
            # `_watch` reads on.
            for reply in self._call:
                found: pb.LeaseReply = reply
                if found.WhichOneof("kind") != "held":
                    return found
                holders = format_jobs(found.held.jobs)
                self._on_wait(f"waiting for {self._channel.where}, whose cores are held by {holders}")
        except grpc.RpcError as error:
            raise self._explain(error) from None
        raise WorkerLostError(
            f"{self._channel.where} ended the call", where=self._channel.address, fix="See the worker's log."
        )

    def _explain(self, error: Any) -> WorkerError:
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return WorkerHeldError(
                printable(error.details() or ""),
                where=self._channel.address,
                fix="Wait for the cores: polyxla run --wait SECONDS ...",
            )
        return self._channel.explain(error)

    def _watch(self) -> None:
        """Read the call until the lease ends for good, and report that unless this process closed it."""
        while True:
            try:
                for _ in self._call:
                    pass
            except grpc.RpcError as error:
                why = lost(self._channel, error)
                is_gone = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            else:
                return
            if self._closed.is_set():
                return
            if not (is_gone and self._resuming and self._renew(self._resuming, why)):
                if not self._closed.is_set():
                    self._on_end(why)
                return

    def _renew(self, resuming: Resuming, why: WorkerError) -> bool:
        """Lease cores again, of this worker or a spare one; return whether there were any in time."""
        addresses = (self._address, *resuming.spares)
        deadline = time.monotonic() + resuming.wait_s
        self._on_wait(f"{why.what}; waiting up to {resuming.wait_s:g} s for {' or '.join(addresses)}")
        for address in itertools.cycle(addresses):
            left = deadline - time.monotonic()
            if left <= 0 or self._closed.is_set():
                return False
            # One that serves another job must not keep this one from the others.
            self._request.wait_s = left if len(addresses) == 1 else min(left, TURN_S)
            try:
                self._connect(address)
                self._revive()
                self._wait_for(self._request)
            # Whatever fails, such as a token that cannot be read now, may succeed at the next attempt; and
            # `close` may have closed the channel.
            except Exception as error:
                _log.info("no cores at %s: %s", address, error)
                self._closed.wait(RETRY_S)
            else:
                # `close` may have come before this call, which it could not end.
                if self._closed.is_set():
                    self._call.cancel()
                return True
        raise AssertionError("a cycle does not end")

    def close(self) -> None:
        """Return the cores to the worker."""
        # This precedes the cancellation: `_watch` sees the call end, and must not report that as a loss.
        self._closed.set()
        with contextlib.suppress(Exception):
            # The worker regards the end of the call as the end of the job. A connection that is gone already
            # has ended it.
            self._call.cancel()
        self._channel.close()
        self._thread.join(CLOSE_S)


def lost(channel: WorkerChannel, error: Any) -> WorkerLostError:
    """Return the error for a job that its worker ended, or whose worker is gone.

    Args:
        channel: the channel to the worker.
        error: the failed call.
    """
    code, details = error.code(), error.details()
    # With these statuses the worker itself ends a job; all others come from the connection.
    if code in (grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
        return WorkerLostError(
            f"{channel.where} ended the job: {details}",
            where=channel.address,
            fix="See the output of that replica and the worker's log.",
        )
    return WorkerLostError(
        f"{channel.where} is gone: {details} ({code.name})",
        where=channel.address,
        fix="See the worker's log for why it ended, and restart it. The job can resume from a checkpoint.",
    )


def _request(
    cores: int, wait_s: float, stall_timeout_s: float, pod: Pod | None, owner: JobOwner
) -> pb.LeaseRequest:
    request = pb.LeaseRequest(
        protocol=PROTOCOL,
        holder=pb.Holder(**asdict(owner)),
        cores=cores,
        wait_s=wait_s,
        stall_timeout_s=stall_timeout_s,
    )
    if pod:
        request.workers, request.worker = pod.workers, pod.worker
        request.host, request.coordinator = pod.host, pod.coordinator
        request.secret = pod.secret
    return request


def _owner(environ: Mapping[str, str]) -> str:
    """Return the secret by which a worker knows the owner of what a job keeps; empty if the job has no name.

    Only this user can derive it, on this machine.

    Raises:
        UsageError: the user has no private directory.
    """
    name = find(environ, POLYXLA_XRT_JOB)
    return shared_secret(environ, f"kept by {name.text}") if name else ""


def _check_cores(asked: int, there: int, address: str) -> None:
    if asked > there:
        set_to = snapshot().get(TPU_NUM_DEVICES)
        raise UsageError(
            f"the job needs {asked} cores, but the worker at {address} has {there}",
            where=f"{TPU_NUM_DEVICES}={set_to}" if set_to else f"the default of {TPU_NUM_DEVICES}, {asked}",
            fix=f"Set {TPU_NUM_DEVICES}={there}, or start the worker with --devices {asked}.",
        )
