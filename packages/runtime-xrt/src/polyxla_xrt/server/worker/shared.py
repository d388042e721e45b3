"""A worker that serves several jobs at once, each in a process of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import grpc

from polyxla_bridge.errors import PjrtError
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol import bulk_encoding
from polyxla_xrt.protocol.bulk_decoding import Decoded
from polyxla_xrt.protocol.worker import PING_S, SILENCE_S, format_holder
from polyxla_xrt.server.worker.keeping import Keeper
from polyxla_xrt.server.worker.leases import Leases
from polyxla_xrt.server.worker.platforms.engines import JobEngines
from polyxla_xrt.server.worker.service import LeasingServicer, attach_command
from polyxla_xrt.server.worker.session import failure

BEGIN_S = float(SILENCE_S)
"""Longest wait for a job's process to serve, and for its client to come there, in seconds."""
DESCRIBE_S = 0.5
"""Longest wait for a job's process to describe itself when somebody asks, in seconds."""
ASK_S, SILENT_S = float(PING_S), 3.0 * SILENCE_S
"""Time between questions to a job's process, and the time without an answer after which it is ended: it has
stopped, and its job's cores would never return. In seconds; more than a busy machine takes.
"""
ASK = b"?"
"""What a job's process answers with its status. Any other message is a `pb.Failure` that ends the job."""
MAX_LINE_BYTES = 1 << 16
"""Largest message between the two processes."""

_BEGUN = struct.Struct("!HI")
"""A process's first message: its port and its pid."""

_log = logging.getLogger("polyxla.worker")

Fork = Callable[[pb.LeaseRequest, int], socket.socket]
"""Starts the process of a job, at a port; returns the line to it, whose end is the job's."""


def begun(port: int) -> bytes:
    """Return the first message of this process, which serves a job at a port."""
    return _BEGUN.pack(port, os.getpid())


class JobProcess:
    """A job in a process of its own, as seen by the process that granted its cores.

    The process is reached by its line: it first sends its port and its pid, then answers each `ASK`. It ends
    when the line is shut, and the line closes when it has ended.

    Args:
        request: the job's request.
        ports: the ports at which the process may serve; 0 for any free one.
        fork: starts the process.
        on_end: called, on a thread, when the process has ended.

    Attributes:
        key: the job's key.
        owner: the secret of its owner.
        holder: the process that owns it.
        cores: number of cores that it holds.
        ended: set once the job is over.
        gone: set once its process has ended.
        port: completes with the port.
    """

    def __init__(
        self,
        request: pb.LeaseRequest,
        ports: Sequence[int],
        fork: Fork,
        on_end: Callable[[JobProcess], None],
    ) -> None:
        self.key: str = request.job
        self.owner: str = request.owner
        self.holder: pb.Holder = request.holder
        self.cores: int = request.cores
        self.ended, self.gone = threading.Event(), threading.Event()
        self.port: Future[int] = Future()
        self._known = pb.Job(holder=request.holder, since=time.time(), cores=request.cores)
        self._request, self._ports, self._fork, self._on_end = request, ports, fork, on_end
        self._line: socket.socket | None = None
        self._answered = threading.Condition()
        threading.Thread(target=self._watch, name="polyxla-job", daemon=True).start()

    def _watch(self) -> None:
        """Start the process and read its line until it has ended."""
        try:
            for port in self._ports:
                with self._fork(self._request, port) as self._line:
                    if not (first := self._line.recv(MAX_LINE_BYTES)):
                        continue
                    found, pid = _BEGUN.unpack(first)
                    self.port.set_result(found)
                    self._read_answers(self._line, pid)
                break
        # The process was killed with messages to it unread.
        except OSError:
            pass
        finally:
            # A process that was killed has logged nothing.
            who = format_holder(self.holder)
            seconds = round(time.time() - self._known.since, 3)
            _log.info("a job's process has ended", extra={"event": {"holder": who, "seconds": seconds}})
            self.ended.set()
            self.gone.set()
            if not self.port.done():
                self.port.set_exception(RuntimeError("no process could serve the job"))
            self._on_end(self)

    def _read_answers(self, line: socket.socket, pid: int) -> None:
        """Ask again and again, and read the answers; end a process that does not answer."""
        line.settimeout(ASK_S)
        heard = time.monotonic()
        while True:
            try:
                if not (message := line.recv(MAX_LINE_BYTES)):
                    return
            except TimeoutError:
                if time.monotonic() - heard > SILENT_S:
                    _log.warning("a job's process has not answered for %g s: ending it", SILENT_S)
                    # It is not reaped while its end of the line is open, so the pid is still its own.
                    os.kill(pid, signal.SIGKILL)
                self._ask(line)
                continue
            heard = time.monotonic()
            with self._answered:
                # A process whose client has not come so far has no job.
                for job in pb.StatusReply.FromString(message).jobs:
                    self._known = job
                self._answered.notify_all()

    def _ask(self, line: socket.socket) -> None:
        # The line is full of questions if the process has stopped, and shut if it is about to end.
        with contextlib.suppress(OSError):
            line.send(ASK, socket.MSG_DONTWAIT)

    def describe(self) -> pb.Job:
        """Return what the process says of its job, or what it said before if it does not answer."""
        with self._answered:
            if self._line is not None and self.port.done() and not self.ended.is_set():
                self._ask(self._line)
                self._answered.wait(DESCRIBE_S)
            return self._known

    def end(self, error: PjrtError) -> None:
        """End the job; its processes receive the reason. Only the first reason counts."""
        self.ended.set()
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.send(failure(error).SerializeToString())
                # What was sent before is still read.
                self._line.shutdown(socket.SHUT_WR)


class SharedServicer(LeasingServicer[JobProcess]):
    """Grants cores to several jobs, and moves each to a process of its own.

    So a job whose program crashes, or cannot be stopped, leaves the others untouched.

    Args:
        engines: the cores, which this process does not use.
        max_jobs: the most jobs at once.
        ports: the ports at which their processes may serve; 0 for any free one.
        started: when the worker was started, on `time.monotonic`'s clock.
        fork: starts the process of a job.
        on_idle: called when a draining worker has no job left.
        keeper: keeps what jobs want to keep; None to keep nothing.
    """

    def __init__(
        self,
        engines: JobEngines,
        max_jobs: int,
        ports: Sequence[int],
        started: float,
        fork: Fork,
        on_idle: Callable[[], None],
        keeper: Keeper | None,
    ) -> None:
        super().__init__(engines, Leases(engines.served.cores, max_jobs), started, on_idle, keeper)
        self.max_jobs = max_jobs
        self._ports, self._fork = ports, fork

    def _make(self, request: pb.LeaseRequest) -> JobProcess:
        return JobProcess(request, self._ports, self._fork, self._give_back)

    def _hold(self, job: JobProcess, context: Any) -> Iterator[pb.LeaseReply]:
        # The job's own process holds the lease from here on: the end of that call ends the job.
        yield pb.LeaseReply(moved=self._moved(job, context))

    def _moved(self, job: JobProcess, context: Any) -> pb.Moved:
        try:
            return pb.Moved(port=job.port.result(BEGIN_S))
        except (RuntimeError, TimeoutError):
            text = "the worker has no process for the job, or no port of --job-ports is free: see its log"
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            raise

    def Session(self, requests: Iterator[Iterable[Decoded]], context: Any) -> Iterator[bytes]:  # noqa: N802
        """Move a process to where its job is."""
        job = self._attached_job(attach_command(requests, context), context)
        yield bulk_encoding.encode([pb.Answer(moved=self._moved(job, context))])

    def stop(self, error: PjrtError, timeout_s: float) -> None:
        """End the jobs and wait for their processes."""
        deadline = time.monotonic() + timeout_s
        super().stop(error, timeout_s)
        for job in self.leases.jobs:
            job.gone.wait(max(0.0, deadline - time.monotonic()))
