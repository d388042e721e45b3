"""A job that holds a worker's cores: its engine, its processes, and its end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from polyxla_bridge.abi import Code
from polyxla_bridge.engine.engine import Engine
from polyxla_bridge.errors import PjrtError
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol import bulk_encoding
from polyxla_xrt.protocol.outbox import Outbox
from polyxla_xrt.protocol.worker import format_holder
from polyxla_xrt.server.worker.session import MemoryBudget, Session, failure

BROKEN_S = 5.0
"""Time for a replica whose program failed to end by itself, in seconds, before its job is ended."""
_COMPILERS = 8
_POLL_S = 0.1

_log = logging.getLogger("polyxla.worker")


@dataclass(eq=False)
class AttachedProcess:
    """A process of the job that drives some of its cores.

    Attributes:
        ordinal: its first ordinal, named in errors when the process is lost.
        cores: the cores that it drives.
        outbox: the answers that wait to be sent to it.
        session: its arrays and programs; None until the job's engine has started.
        snapshot: where its newest snapshot is; None if it cannot go back to one.
    """

    ordinal: int
    cores: frozenset[int]
    outbox: Outbox
    session: Session | None = None
    snapshot: int | None = None


class LeasedJob:
    """The job that holds a worker's cores.

    Args:
        holder: the owner of the job.
        cores: number of this worker's cores that it holds.
        coordinator: ``host:port`` of the coordinator of its replicas.
        memory_limit_bytes: limit of its arrays.
        make_engine: starts its engine; called on a thread.
        close_s: longest wait for the engine to finish what the job left behind, in seconds; after that, it is
            given up.
        key: secret that only the job's own processes know.
        wait_until_open: blocks until the engine can be started; called at once, on the same thread.
        is_resumable: whether its processes begin again, on the worker that it has then, when it ends with
            status UNAVAILABLE.
        owner: a secret of its owner, for what its jobs keep; empty for a job that keeps nothing.

    Attributes:
        key: the key.
        owner: the secret of its owner.
        since: when it got the cores, in seconds since 1970.
        budget: the memory of its arrays.
        ended: set once the job is over.
        is_resumable: whether its processes begin again.
    """

    def __init__(
        self,
        holder: pb.Holder,
        cores: int,
        coordinator: str,
        memory_limit_bytes: int,
        make_engine: Callable[[], Engine],
        close_s: float,
        key: str,
        *,
        wait_until_open: Callable[[], None] = lambda: None,
        is_resumable: bool = False,
        owner: str = "",
    ) -> None:
        self.key, self.owner = key, owner
        self.is_resumable = is_resumable
        self.holder = holder
        self.cores = cores
        self.coordinator = coordinator
        self.since = time.time()
        self.budget = MemoryBudget(memory_limit_bytes, format_holder(holder))
        self.ended = threading.Event()
        self._close_s = close_s
        self._why: pb.Failure | None = None
        self._engine: Future[Engine] = Future()
        self._is_starting = False
        self._processes: set[AttachedProcess] = set()
        # The lock guards `_processes`, `_is_starting` and the transition to the end (`_why`, `ended`). No
        # thread holds it while it waits.
        self._lock = threading.Lock()
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="polyxla-compile")
        start = (wait_until_open, make_engine)
        threading.Thread(target=self._start, args=start, name="polyxla-start", daemon=True).start()

    def _start(self, wait_until_open: Callable[[], None], make_engine: Callable[[], Engine]) -> None:
        try:
            # The job has its cores before they are open, so it may end before, too.
            wait_until_open()
            with self._lock:
                self._is_starting = not self.ended.is_set()
            if self._is_starting:
                self._engine.set_result(make_engine())
            else:
                self._engine.set_exception(PjrtError(self.why.code, self.why.message))
        except Exception as error:
            # Each process that attaches gets the error: there is no caller on this thread to raise it to.
            self._engine.set_exception(error)

    @property
    def why(self) -> pb.Failure:
        """Why the job is over; empty while it runs."""
        return self._why or pb.Failure()

    def describe(self) -> pb.Job:
        """Return the message that describes the job."""
        return pb.Job(
            holder=self.holder,
            since=self.since,
            cores=self.cores,
            sessions=len(self._processes),
            memory_bytes=self.budget.held_bytes,
        )

    def attach(self, ordinal: int, cores: Sequence[int], outbox: Outbox, timeout_s: float) -> AttachedProcess:
        """Attach a process that drives some of the job's cores; blocks until the engine has started.

        Args:
            ordinal: the process's first ordinal.
            cores: the cores, numbered among those of the job.
            outbox: takes the answers to the process.
            timeout_s: longest wait for the engine, in seconds.

        Raises:
            PjrtError: the cores do not exist, another process of the job drives them, or the job is over.
        """
        process = AttachedProcess(ordinal, frozenset(cores), outbox)
        # The registration precedes the wait, so that no other process can claim the cores during it.
        self._register(process, cores)
        try:
            engine = self._engine.result(timeout_s)
        except BaseException:
            self._processes.discard(process)
            raise

        def send(answer: pb.Answer | bulk_encoding.BulkMessage, size: int) -> bool:
            return outbox.put(answer, size)

        def break_off(program: str, error: BaseException) -> None:
            text = f"{program} failed in ordinal {ordinal}, and other replicas wait for it: {error}"
            # The delay lets the failing process get its own error first, which says more than the end of the
            # job.
            timer = threading.Timer(BROKEN_S, self.end, [PjrtError(Code.ABORTED, text)])
            timer.daemon = True
            timer.start()

        process.session = Session(
            engine, sorted(process.cores), self.budget, self._compilers, send, break_off
        )
        return process

    def agree(
        self, process: AttachedProcess, snapshot: int | None, timeout_s: float, gone: Callable[[], bool]
    ) -> int:
        """Wait for the other processes, and return the smallest of all their newest snapshots.

        Args:
            process: a process that begins its session.
            snapshot: its newest; None if it cannot go back.
            timeout_s: longest wait, in seconds.
            gone: returns whether the process has gone.

        Raises:
            PjrtError: not all came in time, or the job is over.
        """
        process.snapshot = snapshot
        # No process waits for those that have met nobody: a replica may come later, when others let it.
        if not snapshot:
            return 0
        deadline = time.monotonic() + timeout_s
        while not gone() and not self.ended.wait(_POLL_S):
            with self._lock:
                back = [each for each in self._processes if each.snapshot is not None]
            missing = set(range(self.cores)).difference(*(each.cores for each in back))
            if not missing:
                return min(each.snapshot or 0 for each in back)
            if time.monotonic() > deadline:
                raise PjrtError(
                    Code.UNAVAILABLE,
                    f"the processes that drive cores {sorted(missing)} have not come back within "
                    f"{timeout_s:g} s: they have ended, or do not reach this worker",
                )
        raise PjrtError(self.why.code or Code.CANCELLED, self.why.message or "the process has gone")

    def withdraw(self, process: AttachedProcess) -> None:
        """Forget a process that has not begun its session after all."""
        self._remove(process)

    def _register(self, process: AttachedProcess, cores: Sequence[int]) -> None:
        # A set drops duplicates, so a core that is listed twice shows in the number of cores below.
        unknown = [core for core in process.cores if core >= self.cores]
        # The checks and the entry are one step: two processes may claim the same core at the same time.
        with self._lock:
            taken = sorted(core for other in self._processes for core in other.cores & process.cores)
            if not process.cores or unknown or len(process.cores) != len(cores):
                raise PjrtError(
                    Code.INVALID_ARGUMENT, f"cores {list(cores)} are not among the {self.cores} of this job"
                )
            if taken:
                raise PjrtError(
                    Code.FAILED_PRECONDITION, f"another process of this job already drives cores {taken}"
                )
            if self._why is not None:
                raise PjrtError(self._why.code, self._why.message)
            self._processes.add(process)

    def detach(self, process: AttachedProcess) -> None:
        """Detach a process that said goodbye."""
        if process.session:
            # This comes first: replicas that wait for this process learn from the watchdog that it has
            # returned.
            process.session.retire()
        self._remove(process)

    def lose(self, process: AttachedProcess, how: str) -> None:
        """End the job because a process is gone without a goodbye: the others cannot continue without it.

        No effect after the process's goodbye.
        """
        if self._remove(process):
            code = Code.UNAVAILABLE if self.is_resumable else Code.ABORTED
            error = PjrtError(code, f"ordinal {process.ordinal} {how}")
            # It is no longer among the processes that `end` informs, but may still be alive.
            process.outbox.put(pb.Answer(ended=pb.Ended(failure=failure(error))), may_wait=False)
            self.end(error)

    def _remove(self, process: AttachedProcess) -> bool:
        with self._lock:
            was_there = process in self._processes
            self._processes.discard(process)
        # This is outside of the lock, because freeing arrays calls the engine.
        if process.session:
            process.session.close()
        return was_there

    def end(self, error: PjrtError) -> None:
        """End the job and send every process the reason; only the first reason counts."""
        with self._lock:
            if self.ended.is_set():
                return
            self._why = failure(error)
            self.ended.set()
            processes = list(self._processes)
        for process in processes:
            # A full outbox must not block the end for all: its client may be the process that died.
            process.outbox.put(pb.Answer(ended=pb.Ended(failure=self._why)), may_wait=False)
            process.outbox.close()

    def close(self) -> bool:
        """Free everything; return whether the engine is closed, too.

        A program that waits for a dead replica cannot be stopped. Then the caller must end this process.
        """
        # From here on no process can attach, so the set below is complete.
        self.end(PjrtError(Code.ABORTED, "the job's launcher has gone"))
        with self._lock:
            processes, self._processes = self._processes, set()
        for process in processes:
            if process.session:
                process.session.close()
        # A compilation cannot be interrupted, and the next job must not wait for its end.
        self._compilers.shutdown(wait=False, cancel_futures=True)
        if not self._is_starting:
            # The cores are still being opened, for the next job: this one will start no engine any more.
            return True
        try:
            # The engine may still be starting. If it does not come in time, it cannot be closed either.
            engine = self._engine.result(self._close_s)
            if not engine.finish(self._close_s):
                return False
            engine.close()
        except Exception as error:
            _log.warning("a job's engine did not close: %s", error)
            return False
        return True
