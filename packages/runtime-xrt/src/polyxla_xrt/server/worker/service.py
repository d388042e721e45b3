"""The gRPC calls of a worker: each checks its request and leaves the rest to `Leases` and the jobs."""

from __future__ import annotations

import hmac
import logging
import re
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from importlib.metadata import version
from itertools import chain, islice
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import grpc

from polyxla.plugin import LOCALHOST
from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError, as_pjrt_error
from polyxla_xrt.config.addresses import join_address
from polyxla_xrt.config.timeouts import LONGEST_WAIT_S
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol import bulk_encoding
from polyxla_xrt.protocol.bulk_decoding import Decoded
from polyxla_xrt.protocol.outbox import Outbox
from polyxla_xrt.protocol.worker import (
    KEY_BYTES,
    OWNER_BYTES,
    PROTOCOL,
    SILENCE_S,
    format_holder,
    format_jobs,
)
from polyxla_xrt.server.worker import glibc_memory
from polyxla_xrt.server.worker.incoming_array import MisuseError
from polyxla_xrt.server.worker.keeping import Keeper, KeptFile, TooMuchError
from polyxla_xrt.server.worker.leased_job import AttachedProcess, LeasedJob
from polyxla_xrt.server.worker.leases import (
    ClosedError,
    DrainingError,
    HeldError,
    Job,
    Leases,
    QueueFullError,
)
from polyxla_xrt.server.worker.platforms.engines import JobEngines

ATTACH_S = 110.0
"""Longest wait for a job's engine to start, in seconds: less than the client's, more than a TPU's takes."""
FIRST_S = 5.0
"""Longest wait for the first message of a call that sends several, in seconds."""
MAX_WORKERS = 1024
"""Maximum number of workers of a job."""
MAX_NAME_CHARS = 300
"""Maximum length of a job's host, user or command: errors of other jobs contain them."""
MAX_DETAILS_BYTES = 2000
"""Maximum length of a status text: gRPC sends it in the headers, whose size is limited."""
NOTIFY_S = 2.0
"""Time for a job's processes to receive why it ended, in seconds, before this process is replaced."""

_log = logging.getLogger("polyxla.worker")
# gRPC numbers its status codes as absl does, so the code of a `PjrtError` is that of a status, too.
_STATUS = {status.value[0]: status for status in grpc.StatusCode}


class KeyedJob(Job, Protocol):
    """A job that its processes name by a secret.

    Attributes:
        key: the secret.
        owner: a secret of its owner; empty for a job that keeps nothing.
        holder: the process that owns it.
    """

    key: str
    owner: str
    holder: pb.Holder

    def end(self, error: PjrtError) -> None:
        """End the job; its processes receive the reason. Only the first reason counts."""


JobT = TypeVar("JobT", bound=KeyedJob)
Request = TypeVar("Request")


class LeasingServicer(ABC, Generic[JobT]):
    """The calls of every worker; each method has the name of its call in `polyxla.xrt.worker.Worker`.

    Args:
        engines: the cores.
        leases: the queue for them.
        started: when the worker was started, on `time.monotonic`'s clock.
        on_idle: called when a draining worker has no job left.
        keeper: keeps what jobs want to keep; None to keep nothing.

    Attributes:
        leases: the queue.
    """

    max_jobs = 1

    def __init__(
        self,
        engines: JobEngines,
        leases: Leases[JobT],
        started: float,
        on_idle: Callable[[], None],
        keeper: Keeper | None,
    ) -> None:
        self.leases = leases
        self._keeper = keeper
        self._engines = engines
        self._started = started
        self._on_idle = on_idle

    @abstractmethod
    def _make(self, request: pb.LeaseRequest) -> JobT:
        """Begin the job of a request that has got its cores; called under the lock of the queue."""

    @abstractmethod
    def _hold(self, job: JobT, context: Any) -> Iterator[pb.LeaseReply]:
        """Yield the replies to the client whose job has got its cores; end with the lease."""

    @abstractmethod
    def Session(self, requests: Iterator[Iterable[Decoded]], context: Any) -> Iterator[bytes]:  # noqa: N802
        """Carry out the commands of one process of a job; yield the answers that travel together."""

    def Lease(self, request: pb.LeaseRequest, context: Any) -> Iterator[pb.LeaseReply]:  # noqa: N802
        """Hold cores for a job until its launcher ends the call.

        The call occupies a thread for the job's whole life, and its end is the only way in which the worker
        learns that a launcher died.
        """
        self._check_lease(request, context)
        job = yield from self._wait_for_cores(request, context)
        if job is not None:
            yield from self._hold(job, context)

    def _wait_for_cores(
        self, request: pb.LeaseRequest, context: Any
    ) -> Generator[pb.LeaseReply, None, JobT | None]:
        """Yield the holders, once, if there are any; return the job, or None if the client has gone."""
        try:
            if request.wait_s:
                # The first attempt does not wait, so that the client learns whom it waits for before the wait
                # begins.
                try:
                    return self._acquire(request, 0.0, context)
                except HeldError as error:
                    yield pb.LeaseReply(held=pb.Held(jobs=error.jobs))
            return self._acquire(request, request.wait_s, context)
        except HeldError as error:
            text = f"the worker's cores are held by {format_jobs(error.jobs)}"
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, _details(text))
        except DrainingError:
            # The status is not UNAVAILABLE, which clients would retry as a worker that is starting.
            context.abort(grpc.StatusCode.ABORTED, "the worker is draining: it takes no more jobs")
        except ClosedError:
            # Clients that wait retry on this status, and reach the worker's next process.
            context.abort(grpc.StatusCode.UNAVAILABLE, "this process of the worker ends")
        except QueueFullError:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many jobs wait for this worker's cores")
        raise AssertionError("abort raises")

    def _acquire(self, request: pb.LeaseRequest, wait_s: float, context: Any) -> JobT | None:
        # A job that asks again has lost its connection, which this worker may notice much later.
        if before := self._job(request.job):
            before.end(PjrtError(Code.UNAVAILABLE, "the job has begun again on this worker"))

        def make() -> JobT:
            if self._keeper is None or not request.owner:
                return self._make(request)
            # This comes first: the job may end at once.
            self._keeper.begin(request.owner)
            try:
                return self._make(request)
            except BaseException:
                self._keeper.end(request.owner)
                raise

        return self.leases.acquire(make, request.cores, wait_s, lambda: not context.is_active())

    def _job(self, key: str) -> JobT | None:
        """Return the job with this key, which may be over if there is no other; None if it holds no cores."""
        # The comparison takes constant time, so that the key cannot be guessed byte by byte. It compares
        # bytes, because it rejects a text that is not ASCII, and a client may send any text.
        found = [job for job in self.leases.jobs if hmac.compare_digest(job.key.encode(), key.encode())]
        # A job that has begun again may not have returned its first cores so far.
        return min(found, key=lambda job: job.ended.is_set(), default=None)

    def _attached_job(self, attach: pb.Attach, context: Any) -> JobT:
        """Return the job that a process attaches to."""
        _check_protocol(attach.protocol, context)
        if (job := self._job(attach.job)) is None:
            _abort(context, pb.Failure(code=Code.NOT_FOUND, message="there is no such job on this worker"))
        return job

    def _give_back(self, job: JobT) -> None:
        self.leases.give_back(job)
        if self._keeper and job.owner:
            self._keeper.end(job.owner)
        if self.leases.is_draining and not self.leases.jobs:
            self._on_idle()

    def _check_lease(self, request: pb.LeaseRequest, context: Any) -> None:
        _check_protocol(request.protocol, context)
        # The holder is kept and repeated in other messages, so all of it must be known and bounded.
        request.DiscardUnknownFields()
        text = None
        if not 1 <= request.cores <= self._engines.served.cores:
            text = f"the job requests {request.cores} cores, but this worker has {self._engines.served.cores}"
        # Both comparisons are negated, so that NaN, with which every comparison is false, is refused as well.
        elif not 0 <= request.wait_s <= LONGEST_WAIT_S or not request.stall_timeout_s >= 0:
            text = "a timeout must be a non-negative number of seconds"
        elif any(
            len(value) > MAX_NAME_CHARS for _, value in request.holder.ListFields() if isinstance(value, str)
        ):
            text = f"a job's host, user and command may have at most {MAX_NAME_CHARS} characters each"
        elif not re.fullmatch(f"[0-9a-f]{{{2 * KEY_BYTES}}}", request.job):
            text = f"a job's key must be {2 * KEY_BYTES} hexadecimal digits"
        elif request.owner and not re.fullmatch(f"[0-9a-f]{{{2 * OWNER_BYTES}}}", request.owner):
            text = f"an owner must be {2 * OWNER_BYTES} hexadecimal digits"
        else:
            text = self._engines.refusal(request) or _pod_problem(request)
        if text:
            # The refusal comes before the request joins the queue, where it would only wait for the same
            # error.
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)

    def Keep(self, requests: Iterator[pb.KeepRequest], context: Any) -> pb.KeepReply:  # noqa: N802
        """Keep bytes under a name for later jobs of the same owner."""
        first = _first(requests, pb.KeepRequest(), context)
        keeper, job = self._keeping_job(first, context)
        file = KeptFile(job.owner, first.name, job.holder.SerializeToString())
        data = (request.data for request in chain([first], requests))
        try:
            keeper.put(file, first.size, data)
        except TooMuchError as error:
            _abort(context, pb.Failure(code=Code.RESOURCE_EXHAUSTED, message=str(error)))
        return pb.KeepReply()

    def Recall(self, request: pb.RecallRequest, context: Any) -> Iterator[pb.RecallReply]:  # noqa: N802
        """Return what is kept under a name."""
        keeper, job = self._keeping_job(request, context)
        if (found := keeper.get(job.owner, request.name)) is None:
            _abort(context, pb.Failure(code=Code.NOT_FOUND, message="there is nothing under this name"))
        for chunk in found:
            yield pb.RecallReply(data=chunk)

    def _keeping_job(self, request: pb.KeepRequest | pb.RecallRequest, context: Any) -> tuple[Keeper, JobT]:
        """Return the keeper and the job of a request; abort its call if there is none."""
        _check_protocol(request.protocol, context)
        if self._keeper is None:
            _abort(context, pb.Failure(code=Code.ABORTED, message="the worker keeps nothing"))
        job = self._job(request.job)
        if job is None or not job.owner:
            _abort(context, pb.Failure(code=Code.ABORTED, message="there is no such job on this worker"))
        if not 0 < len(request.name) <= MAX_NAME_CHARS:
            text = f"a name has 1 to {MAX_NAME_CHARS} characters"
            _abort(context, pb.Failure(code=Code.INVALID_ARGUMENT, message=text))
        return self._keeper, job

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:  # noqa: N802
        """Return what is served, and which jobs hold cores."""
        return self.status()

    def Drain(self, request: pb.DrainRequest, context: Any) -> pb.StatusReply:  # noqa: N802
        """Refuse new jobs, and exit after those that run."""
        self.leases.drain()
        if not self.leases.jobs:
            # The delay lets the caller get its answer first.
            threading.Timer(0.5, self._on_idle).start()
        return self.status()

    def status(self) -> pb.StatusReply:
        """Return the reply to `Status`."""
        return pb.StatusReply(
            version=version("polyxla-runtime-xrt"),
            protocol=PROTOCOL,
            platform=self._engines.served.platform,
            cores=self._engines.served.cores,
            draining=self.leases.is_draining,
            jobs=[job.describe() for job in self.leases.jobs],
            max_jobs=self.max_jobs,
            waiting=self.leases.waiting,
            jobs_served=self.leases.served,
            up_s=time.monotonic() - self._started,
            kept=self._keeper.describe() if self._keeper else (),
        )

    def stop(self, error: PjrtError, timeout_s: float) -> None:
        """End the jobs, because this process is about to end.

        Args:
            error: the reason.
            timeout_s: longest wait for jobs in other processes, in seconds.
        """
        # The cores that return now would otherwise go to the next job, which would end with this process.
        self.leases.close()
        for job in self.leases.jobs:
            job.end(error)


class WorkerServicer(LeasingServicer[LeasedJob]):
    """A worker that serves one job at a time, in this process.

    Args:
        engines: the cores.
        memory_limit_bytes: limit of a job's arrays.
        started: when the worker was started, on `time.monotonic`'s clock.
        give_up: called when this process must be replaced to free a job's engine.
        on_idle: called when a draining worker has no job left.
        only: key of the only job that this process serves, which ends after it; None for every job.
        keeper: keeps what jobs want to keep; None to keep nothing.
    """

    def __init__(
        self,
        engines: JobEngines,
        memory_limit_bytes: int,
        started: float,
        give_up: Callable[[], None],
        on_idle: Callable[[], None],
        only: str | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        super().__init__(engines, Leases(engines.served.cores), started, on_idle, keeper)
        self._memory_limit_bytes = memory_limit_bytes
        self._give_up = give_up
        self._only = only

    def _make(self, request: pb.LeaseRequest) -> LeasedJob:
        # The port is chosen when the cores are free: another process could take it during a long wait.
        coordinator = coordinator_address(request)
        # The engine starts on a thread of its own, because this function runs under the lock of the queue.
        job = LeasedJob(
            request.holder,
            request.cores,
            coordinator,
            self._memory_limit_bytes,
            lambda: self._engines.start(request, coordinator, lambda text: job.end(_stalled(text))),
            self._engines.close_s,
            request.job,
            wait_until_open=self._engines.wait_until_open,
            is_resumable=request.resumable,
            owner=request.owner,
        )
        who = format_holder(request.holder)
        _log.info("lease granted", extra={"event": {"holder": who, "cores": request.cores}})
        return job

    def _acquire(self, request: pb.LeaseRequest, wait_s: float, context: Any) -> LeasedJob | None:
        if self._only is not None and not hmac.compare_digest(self._only.encode(), request.job.encode()):
            context.abort(grpc.StatusCode.NOT_FOUND, "this process serves another job")
        job = super()._acquire(request, wait_s, context)
        if self._only is not None:
            self.leases.drain()
        return job

    def _hold(self, job: LeasedJob, context: Any) -> Iterator[pb.LeaseReply]:
        # The end of the call is the end of the job.
        try:
            # `add_callback` returns False if the call has ended, and then never calls the function.
            if not context.add_callback(lambda: job.end(_gone(job))):
                return
            yield pb.LeaseReply(
                granted=pb.Granted(
                    coordinator=job.coordinator,
                    platform=self._engines.served.platform,
                    memory_limit_bytes=self._memory_limit_bytes,
                )
            )
            job.ended.wait()
        finally:
            # Closing the engine takes seconds, so it happens on another thread, and the client gets the
            # reason at once.
            threading.Thread(target=self._retire, args=(job,), name="polyxla-retire", daemon=True).start()
        _abort(context, job.why)

    def _retire(self, job: LeasedJob) -> None:
        """Close a job's engine and return its cores; if that is impossible, have this process replaced."""
        seconds = round(time.time() - job.since, 3)
        is_free = job.close()
        glibc_memory.trim()
        _log.info("lease returned", extra={"event": {"why": job.why.message, "seconds": seconds}})
        if not is_free and not self.leases.is_draining:
            _log.warning("a program of the job cannot be stopped: replacing this process")
            time.sleep(NOTIFY_S)
            # The cores stay leased: the next job gets them in the new process.
            self._give_up()
            return
        # A draining worker exits in any case, which also ends a program that cannot be stopped.
        self._give_back(job)

    def lose_cores(self, why: str) -> None:
        """End the job, if there is one, and have this process replaced.

        Args:
            why: what happened to the cores.
        """
        # The job ends first, so that its processes receive the reason while this process can still send it.
        self.stop(PjrtError(Code.ABORTED, why), 0.0)
        _log.warning("%s: replacing this process", why)
        time.sleep(NOTIFY_S)
        self._give_up()

    def Session(self, requests: Iterator[Iterable[Decoded]], context: Any) -> Iterator[bytes]:  # noqa: N802
        """Carry out the commands of one process of a job; yield the answers that travel together.

        Two threads: gRPC's own iterates over this generator and so sends the answers; the reader carries out
        the commands. The outbox is between them. It ends in one of three ways: the reader closes it after the
        last command, the job closes it when it is over, or gRPC cuts it when the connection is lost.
        """
        outbox = Outbox()
        attach = attach_command(requests, context)
        # This waits until the engine has started, so that the reader finds a session.
        job, process, snapshot = self._attach(attach, outbox, context)
        reader = threading.Thread(
            target=_read, args=(requests, job, process), name=f"polyxla-session-{attach.ordinal}", daemon=True
        )
        # `add_callback` returns False if the call has ended. Then nothing would cut the outbox, so the reader
        # must not start.
        if not context.add_callback(outbox.cut):
            job.lose(process, "died or lost its connection")
            return
        reader.start()
        # The reader may have queued answers by now, and the client must get this answer before them.
        yield bulk_encoding.encode([pb.Answer(attached=pb.Attached(snapshot=snapshot))])
        yield from bulk_encoding.encode_all(outbox.take)

    def _attach(
        self, attach: pb.Attach, outbox: Outbox, context: Any
    ) -> tuple[LeasedJob, AttachedProcess, int]:
        """Return the job, the process, and the snapshot that it goes back to."""
        job = self._attached_job(attach, context)
        snapshot = attach.snapshot if attach.HasField("snapshot") else None
        try:
            process = job.attach(attach.ordinal, attach.cores, outbox, ATTACH_S)
            try:
                agreed = job.agree(process, snapshot, ATTACH_S, lambda: not context.is_active())
            except BaseException:
                job.withdraw(process)
                raise
        except Exception as error:
            known = as_pjrt_error(error)
            _abort(context, pb.Failure(code=known.code, message=known.message))
        return job, process, agreed


def _read(requests: Iterator[Iterable[Decoded]], job: LeasedJob, process: AttachedProcess) -> None:
    """Carry out a session's commands until its goodbye, its death or its first invalid command."""
    assert process.session is not None
    how = f"died, or was unreachable for {SILENCE_S} s"
    try:
        # The loop also ends when the stream does. Without a goodbye before that, the process has died.
        for commands in requests:
            for command, data in commands:
                if command.WhichOneof("kind") == "goodbye":
                    job.detach(process)
                    return
                process.session.handle(command, data)
    except MisuseError as error:
        how = f"violated the protocol: {error}"
    # `how` already describes a connection that broke, for which gRPC raises this.
    except grpc.RpcError:
        pass
    except Exception as error:
        _log.exception("a session's command failed")
        how = f"sent a command that failed: {type(error).__name__}: {error}"
    finally:
        # This has no effect after a goodbye, which has detached the process.
        job.lose(process, how)
        process.outbox.close()


def _first(requests: Iterator[Request], nothing: Request, context: Any) -> Request:
    """Return the first message of a call, or `nothing` if it ends without one."""
    # A client that sends none would occupy a thread of the server for as long as it likes.
    timer = threading.Timer(FIRST_S, context.cancel)
    timer.daemon = True
    timer.start()
    try:
        return next(requests, nothing)
    finally:
        timer.cancel()


def attach_command(requests: Iterator[Iterable[Decoded]], context: Any) -> pb.Attach:
    """Return the first command of a session; abort the call if it is another one."""
    # Two commands are enough to see that Attach is not alone: the batch may hold a million.
    first = list(islice(_first(requests, (), context), 2))
    if len(first) != 1 or first[0].message.WhichOneof("kind") != "attach":
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first command of a session must be Attach")
    attach: pb.Attach = first[0].message.attach
    return attach


def _pod_problem(request: pb.LeaseRequest) -> str | None:
    if request.workers <= 1:
        return "the worker of a single-worker job chooses the coordinator" if request.coordinator else None
    name = request.host[:MAX_NAME_CHARS]
    if not (request.host and request.worker < request.workers <= MAX_WORKERS):
        return f"worker {request.worker} of {request.workers} at {name!r} is invalid"
    # Two coordinators would split the job, and without a coordinator its workers would never meet.
    if bool(request.worker) != bool(request.coordinator):
        return "the first worker chooses the coordinator, and only the requests to the others contain it"
    try:
        # The check precedes the wait for the cores: resolving a name may block, and must not block their
        # holder.
        coordinator_address(request)
    # A host with a null character raises TypeError.
    except (OSError, TypeError, ValueError) as error:
        return f"the coordinator cannot be at {name!r}, which must be an address of this worker: {error}"
    # The port of the coordinator is open to the network, and only this secret keeps others out.
    if not 0 < len(request.secret) <= MAX_NAME_CHARS:
        return "the workers of a job need a secret by which they know each other"
    return None


def _check_protocol(protocol: int, context: Any) -> None:
    if protocol != PROTOCOL:
        text = f"the client speaks protocol {protocol}, this worker {PROTOCOL}"
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)


def _abort(context: Any, why: pb.Failure) -> NoReturn:
    context.abort(_STATUS[why.code], _details(why.message))
    raise AssertionError


def _details(text: str) -> str:
    # The limit counts bytes, and the cut may split the last character.
    return text.encode()[:MAX_DETAILS_BYTES].decode(errors="ignore")


def _gone(job: LeasedJob) -> PjrtError:
    code = Code.UNAVAILABLE if job.is_resumable else Code.CANCELLED
    return PjrtError(code, "the job's launcher has ended, or was unreachable")


def _stalled(text: str) -> PjrtError:
    return PjrtError(Code.DEADLINE_EXCEEDED, text)


def coordinator_address(request: pb.LeaseRequest) -> str:
    """Return the coordinator of a job's replicas, ``host:port``: the one in the request, or a free port here.

    The first worker of a job chooses it, and the request to the others contains it.

    Raises:
        ValueError: the requested address is not ``host:port``.
        OSError: the requested host is not an address of this machine.
        TypeError: the requested host contains a null character.
    """
    if request.coordinator:
        host, _, port = request.coordinator.rpartition(":")
        if not (host and port.isdecimal() and host.isprintable()):
            raise ValueError("the coordinator is not host:port")
        return request.coordinator
    host = request.host if request.workers > 1 else LOCALHOST
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The engine binds the port itself, so it must be free again.
    with closing(socket.socket(family)) as probe:
        probe.bind((host, 0))
        return join_address(host, probe.getsockname()[1])
