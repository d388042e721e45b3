"""The calls of a worker: each checks what it is given, and leaves the rest to `Leases` and `Job`."""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, NoReturn

import grpc

from polyxla_bridge.abi import Code
from polyxla_bridge.engine import memory_accounting
from polyxla_bridge.engine.engine import Engine
from polyxla_bridge.errors import PjrtError, as_pjrt_error
from polyxla_xrt.config.timeouts import LONGEST_WAIT_S
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol.outbox import Outbox
from polyxla_xrt.protocol.worker import PROTOCOL, SILENCE_S, format_holder
from polyxla_xrt.server import engines
from polyxla_xrt.server.worker.leased_job import AttachedProcess, LeasedJob
from polyxla_xrt.server.worker.leases import CrowdError, DrainingError, HeldError, Leases, held
from polyxla_xrt.server.worker.session import MisuseError

ATTACH_S = 60.0
"""Longest wait, in seconds, for a job's engine to start."""
FIRST_S = 5.0
"""How long a client may take to say who it is, in seconds."""
MOST_WORKERS = 1024
"""Most workers of a job."""
NAME_CHARS = 300
"""Longest host, user or command of a job: other jobs are told of them in an error."""
DETAILS_BYTES = 2000
"""Longest text of an error's status: gRPC sends it among the headers, which have a limit."""
TELL_S = 2.0
"""How long a job's processes may take to hear why it is over, in seconds, before this one is replaced."""

_log = logging.getLogger("polyxla.worker")
_STATUS = {status.value[0]: status for status in grpc.StatusCode}

MakeEngine = Callable[[pb.LeaseRequest, str, Callable[[str], None]], Engine]
"""Starts an engine for a job that meets at an address; told what to call when its replicas wait in vain."""


@dataclass
class WorkerSettings:
    """What a worker serves.

    Attributes:
        cores: how many there are.
        platform: what they are.
        memory_limit_bytes: how much a job's arrays may take; default: the machine's memory.
        started: when it was started, on `time.monotonic`'s clock.
    """

    cores: int
    platform: str
    memory_limit_bytes: int = field(default_factory=memory_accounting.machine_bytes)
    started: float = field(default_factory=time.monotonic)


class WorkerServicer:
    """Answers the calls of `polyxla.xrt.worker.Worker`. Method names are those of the calls.

    Args:
        settings: what is served.
        make_engine: starts a job's engine.
        give_up: called when a job's engine cannot be freed but with this process.
        on_idle: called when a worker that is draining has no job any more.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        make_engine: MakeEngine,
        give_up: Callable[[], None],
        on_idle: Callable[[], None],
    ) -> None:
        self.leases = Leases()
        self._settings = settings
        self._make_engine = make_engine
        self._give_up = give_up
        self._on_idle = on_idle

    def Lease(self, request: pb.LeaseRequest, context: Any) -> Iterator[pb.LeaseReply]:  # noqa: N802
        """Hold the cores for a job until its launcher ends the call."""
        self._check_lease(request, context)
        job = None
        try:
            if request.wait_s:
                try:
                    job = self._acquire(request, 0.0, context)
                except HeldError as error:
                    yield pb.LeaseReply(held=error.held)
            job = job or self._acquire(request, request.wait_s, context)
        except HeldError as error:
            since = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(error.held.since))
            text = f"the worker's cores are held by {format_holder(error.held.holder)} since {since}"
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, _details(text))
        except DrainingError:
            # Not UNAVAILABLE, which says that there is no worker at all.
            context.abort(grpc.StatusCode.ABORTED, "the worker is draining: it takes no more jobs")
        except CrowdError:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many jobs wait for this worker's cores")
        if job is None:
            return
        try:
            if not context.add_callback(lambda: job.end(_gone())):
                return
            yield pb.LeaseReply(
                granted=pb.Granted(
                    job=job.key,
                    coordinator=job.coordinator,
                    platform=self._settings.platform,
                    memory_limit_bytes=self._settings.memory_limit_bytes,
                )
            )
            job.ended.wait()
        finally:
            # Not here: the client is to hear at once why its job is over.
            threading.Thread(target=self._retire, args=(job,), name="polyxla-retire", daemon=True).start()
        _abort(context, job.why)

    def _check_lease(self, request: pb.LeaseRequest, context: Any) -> None:
        _check_protocol(request.protocol, context)
        text = None
        if not 1 <= request.cores <= self._settings.cores:
            text = f"the job asks for {request.cores} cores, and this worker has {self._settings.cores}"
        elif not 0 <= request.wait_s <= LONGEST_WAIT_S or not request.stall_timeout_s >= 0:
            text = "a wait must be a number of seconds from 0"
        elif any(
            len(value) > NAME_CHARS for _, value in request.holder.ListFields() if isinstance(value, str)
        ):
            text = f"a job's host, user and command have at most {NAME_CHARS} characters each"
        else:
            text = _problem_of_pod(request)
        if text:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)

    def _acquire(self, request: pb.LeaseRequest, wait_s: float, context: Any) -> LeasedJob | None:
        def make() -> LeasedJob:
            meeting = engines.coordinator(request)
            job = LeasedJob(
                request.holder,
                request.cores,
                meeting,
                self._settings.memory_limit_bytes,
                lambda: self._make_engine(request, meeting, lambda text: job.end(_stalled(text))),
            )
            who = format_holder(request.holder)
            _log.info("lease granted", extra={"event": {"holder": who, "cores": request.cores}})
            return job

        return self.leases.acquire(make, wait_s, lambda: not context.is_active())

    def _retire(self, job: LeasedJob) -> None:
        seconds = round(time.time() - job.since, 3)
        is_free = job.close()
        engines.return_memory()
        _log.info("lease returned", extra={"event": {"why": job.why.message, "seconds": seconds}})
        if not is_free and not self.leases.is_draining:
            _log.warning("a program of that job cannot be stopped: this process is replaced")
            time.sleep(TELL_S)
            self._give_up()
            return
        if is_free:
            self.leases.give_back(job)
        if self.leases.is_draining:
            self._on_idle()

    def Session(self, requests: Iterator[pb.Commands], context: Any) -> Iterator[list[Any]]:  # noqa: N802
        """Do what one process of a job asks for; yield the answers that travel together."""
        outbox = Outbox()
        attach = _first(requests, context)
        job, place = self._attach(attach, outbox, context)
        reader = threading.Thread(
            target=_read, args=(requests, job, place), name=f"polyxla-session-{attach.ordinal}", daemon=True
        )
        if not context.add_callback(outbox.cut):
            job.lose(place, "died or lost its connection")
            return
        reader.start()
        yield [pb.Answer(attached=pb.Attached())]
        while (answers := outbox.take()) is not None:
            yield answers

    def _attach(self, attach: pb.Attach, outbox: Outbox, context: Any) -> tuple[LeasedJob, AttachedProcess]:
        _check_protocol(attach.protocol, context)
        job = self.leases.job
        if job is None or not hmac.compare_digest(job.key.encode(), attach.job.encode()):
            _abort(context, pb.Failure(code=Code.NOT_FOUND, message="there is no such job on this worker"))
        try:
            return job, job.attach(attach.ordinal, attach.cores, outbox, ATTACH_S)
        except Exception as error:
            known = as_pjrt_error(error)
            _abort(context, pb.Failure(code=known.code, message=known.message))

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:  # noqa: N802
        """Say what is served, and who has it."""
        return self.status()

    def Drain(self, request: pb.DrainRequest, context: Any) -> pb.StatusReply:  # noqa: N802
        """Take no more jobs, and end after the one that runs."""
        self.leases.drain()
        if self.leases.job is None:
            # Its caller is to have the answer first.
            threading.Timer(0.5, self._on_idle).start()
        return self.status()

    def status(self) -> pb.StatusReply:
        """Return what `Status` answers."""
        job = self.leases.job
        return pb.StatusReply(
            version=version("polyxla-runtime-xrt"),
            protocol=PROTOCOL,
            platform=self._settings.platform,
            cores=self._settings.cores,
            draining=self.leases.is_draining,
            job=held(job) if job else None,
            sessions=job.sessions if job else 0,
            memory_bytes=job.budget.held_bytes if job else 0,
            waiting=self.leases.waiting,
            jobs_served=self.leases.served,
            up_s=time.monotonic() - self._settings.started,
        )


def _read(requests: Iterator[pb.Commands], job: LeasedJob, place: AttachedProcess) -> None:
    """Carry out a session's commands until it says goodbye, dies or makes a mistake."""
    assert place.session is not None
    how = f"died, or was out of reach for {SILENCE_S} s"
    try:
        for commands in requests:
            for command in commands.commands:
                if command.WhichOneof("kind") == "goodbye":
                    job.leave(place)
                    return
                place.session.handle(command)
    except MisuseError as error:
        how = f"does not speak the protocol: {error}"
    except grpc.RpcError:
        pass
    except Exception as error:
        _log.exception("a session's command failed")
        how = f"sent what this worker cannot do: {type(error).__name__}: {error}"
    finally:
        job.lose(place, how)
        place.outbox.close()


def _first(requests: Iterator[pb.Commands], context: Any) -> pb.Attach:
    timer = threading.Timer(FIRST_S, context.cancel)
    timer.daemon = True
    timer.start()
    try:
        first = next(requests, pb.Commands())
    finally:
        timer.cancel()
    if len(first.commands) != 1 or first.commands[0].WhichOneof("kind") != "attach":
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a session begins with one Attach")
    return first.commands[0].attach


def _problem_of_pod(request: pb.LeaseRequest) -> str | None:
    if request.workers <= 1:
        return "a job of one worker meets where that worker says" if request.coordinator else None
    name = request.host[:NAME_CHARS]
    if not (request.host and request.worker < request.workers <= MOST_WORKERS):
        return f"worker {request.worker} of {request.workers} at {name!r} cannot be"
    if bool(request.worker) != bool(request.coordinator):
        return "the first worker chooses where a job meets, and the others are told"
    try:
        # Before the cores are waited for: who has them must not wait for a name's address.
        engines.coordinator(request)
    # TypeError: of a host with a null character.
    except (OSError, TypeError, ValueError) as error:
        return f"the job cannot meet at {name!r}, which must be this worker's own address: {error}"
    return None


def _check_protocol(protocol: int, context: Any) -> None:
    if protocol != PROTOCOL:
        text = f"the client speaks protocol {protocol}, this worker {PROTOCOL}"
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)


def _abort(context: Any, why: pb.Failure) -> NoReturn:
    context.abort(_STATUS[why.code], _details(why.message))
    raise AssertionError


def _details(text: str) -> str:
    return text.encode()[:DETAILS_BYTES].decode(errors="ignore")


def _gone() -> PjrtError:
    return PjrtError(Code.CANCELLED, "the job's launcher has ended, or was out of reach")


def _stalled(text: str) -> PjrtError:
    return PjrtError(Code.DEADLINE_EXCEEDED, text)
