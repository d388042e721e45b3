"""One job on a worker: its engine, its sessions, and its end."""

from __future__ import annotations

import logging
import secrets
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
from polyxla_xrt.server.worker.memory_budget import MemoryBudget
from polyxla_xrt.server.worker.session import Session, failure

CLOSE_S = 3.0
"""How long an engine may take, in seconds, to finish what a job has left behind; then it is given up."""
BROKEN_S = 5.0
"""How long a replica whose program failed may take, in seconds, to end by itself, before its job ends."""
_COMPILERS = 8

_log = logging.getLogger("polyxla.worker")


@dataclass(eq=False)
class Place:
    """A session as its job sees it.

    Attributes:
        ordinal: to be named when it is lost.
        cores: the cores that it drives.
        outbox: what waits to be sent to its client.
        session: what it holds.
    """

    ordinal: int
    cores: frozenset[int]
    outbox: Outbox
    session: Session | None = None


class Job:
    """What has a worker's cores.

    Args:
        holder: who it belongs to.
        cores: how many of this worker's cores it has.
        coordinator: where the replicas of its workers meet.
        memory_limit_bytes: how much its arrays may take.
        make_engine: starts its engine; called on a thread, at once.

    Attributes:
        key: known to its own processes only.
        since: when it got the cores, in seconds since 1970.
        ended: set once it is over.
    """

    def __init__(
        self,
        holder: pb.Holder,
        cores: int,
        coordinator: str,
        memory_limit_bytes: int,
        make_engine: Callable[[], Engine],
    ) -> None:
        self.key = secrets.token_hex(16)
        self.holder = holder
        self.cores = cores
        self.coordinator = coordinator
        self.since = time.time()
        self.budget = MemoryBudget(memory_limit_bytes, format_holder(holder))
        self.ended = threading.Event()
        self._why: pb.Failure | None = None
        self._engine: Future[Engine] = Future()
        self._places: set[Place] = set()
        self._lock = threading.Lock()
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="polyxla-compile")
        threading.Thread(target=self._start, args=(make_engine,), name="polyxla-start", daemon=True).start()

    def _start(self, make_engine: Callable[[], Engine]) -> None:
        try:
            self._engine.set_result(make_engine())
        except Exception as error:
            self._engine.set_exception(error)

    @property
    def why(self) -> pb.Failure:
        """Why it is over."""
        return self._why or pb.Failure()

    @property
    def sessions(self) -> int:
        """How many processes are attached."""
        return len(self._places)

    def attach(self, ordinal: int, cores: Sequence[int], outbox: Outbox, timeout_s: float) -> Place:
        """Let a process drive some of the job's cores; waits for the engine.

        Raises:
            PjrtError: they are not there, or another process of the job has them, or the job is over.
        """
        place = Place(ordinal, frozenset(cores), outbox)
        strangers = sorted(core for core in place.cores if core >= self.cores)
        with self._lock:
            taken = sorted(core for other in self._places for core in other.cores & place.cores)
            if not place.cores or strangers or len(place.cores) != len(cores):
                raise PjrtError(
                    Code.INVALID_ARGUMENT, f"cores {list(cores)} are not among the {self.cores} of this job"
                )
            if taken:
                raise PjrtError(
                    Code.FAILED_PRECONDITION, f"cores {taken} are another process's of this job already"
                )
            if self._why is not None:
                raise PjrtError(self._why.code, self._why.message)
            self._places.add(place)
        try:
            engine = self._engine.result(timeout_s)
        except BaseException:
            self._places.discard(place)
            raise

        def send(answer: pb.Answer | bulk_encoding.Bulk, size: int) -> bool:
            return outbox.put(answer, size)

        def break_off(program: str, error: BaseException) -> None:
            text = f"{program} failed in ordinal {ordinal}, and others wait for it: {error}"
            # Its own process hears of it at once, and says more.
            timer = threading.Timer(BROKEN_S, self.end, [PjrtError(Code.ABORTED, text)])
            timer.daemon = True
            timer.start()

        place.session = Session(engine, sorted(place.cores), self.budget, self._compilers, send, break_off)
        return place

    def leave(self, place: Place) -> None:
        """Take a process's leave: it has said goodbye."""
        self._drop(place)

    def lose(self, place: Place, how: str) -> None:
        """Note that a process is gone without a goodbye; nobody else can go on without it."""
        if self._drop(place):
            error = PjrtError(Code.ABORTED, f"ordinal {place.ordinal} {how}")
            # If it is there after all, it hears why as well.
            place.outbox.put(pb.Answer(ended=pb.Ended(failure=failure(error))), may_wait=False)
            self.end(error)

    def _drop(self, place: Place) -> bool:
        with self._lock:
            was_there = place in self._places
            self._places.discard(place)
        if place.session:
            place.session.close()
        return was_there

    def end(self, error: PjrtError) -> None:
        """Tell every process why the job is over; the first reason counts."""
        with self._lock:
            if self.ended.is_set():
                return
            self._why = failure(error)
            self.ended.set()
            places = list(self._places)
        for place in places:
            place.outbox.put(pb.Answer(ended=pb.Ended(failure=self._why)), may_wait=False)
            place.outbox.close()

    def close(self) -> bool:
        """Free everything; return whether the engine is gone as well, or has to be given up.

        A program that waits for a replica which is dead cannot be stopped, but with its process.
        """
        self.end(PjrtError(Code.ABORTED, "the job's launcher has gone"))
        with self._lock:
            places, self._places = self._places, set()
        for place in places:
            if place.session:
                place.session.close()
        self._compilers.shutdown(wait=False, cancel_futures=True)
        try:
            engine = self._engine.result(CLOSE_S)
            if not engine.finish(CLOSE_S):
                return False
            engine.close()
        except Exception as error:
            _log.warning("a job's engine did not end in order: %s", error)
            return False
        return True
