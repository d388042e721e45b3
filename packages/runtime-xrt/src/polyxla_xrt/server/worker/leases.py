"""Who has a worker's cores, who waits for them, and whether anybody may have them at all."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.server.worker.leased_job import LeasedJob

WAITING = 32
"""How many jobs may wait."""
RETURNING_S = 30.0
"""How long any job waits for one that is over to let go of the cores, in seconds."""


class HeldError(Exception):
    """The cores are another job's, and it is not waited for any longer.

    Args:
        held: that job.
    """

    def __init__(self, held: pb.Held) -> None:
        super().__init__()
        self.held = held


class DrainingError(Exception):
    """The worker takes no more jobs."""


class CrowdError(Exception):
    """Too many jobs wait."""


class Leases:
    """One job at a time; the others wait in the order in which they came.

    Attributes:
        served: how many jobs have had the cores.
        is_draining: whether no more jobs are taken.
        idle_since: when the last job gave the cores back, on `time.monotonic`'s clock.
    """

    def __init__(self) -> None:
        self._job: LeasedJob | None = None
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()
        self.served = 0
        self.is_draining = False
        self.idle_since = time.monotonic()

    @property
    def job(self) -> LeasedJob | None:
        """The job that has the cores, or had them and does not let go yet."""
        return self._job

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._queue)

    def acquire(
        self,
        make: Callable[[], LeasedJob],
        wait_s: float,
        gone: Callable[[], bool],
    ) -> LeasedJob | None:
        """Wait for the cores, and make them a job's.

        Args:
            make: makes the job; called when the cores are free.
            wait_s: longest wait for another job's end, in seconds.
            gone: whether the one who waits has gone.

        Returns:
            The job; None if who wanted it has gone.

        Raises:
            HeldError: another job has them all the time.
            DrainingError: the worker takes no more jobs.
            CrowdError: too many wait already.
        """
        started, ticket = time.monotonic(), object()
        with self._changed:
            if len(self._queue) >= WAITING:
                raise CrowdError
            self._queue.append(ticket)
            try:
                while True:
                    if self.is_draining:
                        raise DrainingError
                    if gone():
                        return None
                    if self._job is None and self._queue[0] is ticket:
                        self._job = make()
                        self.served += 1
                        return self._job
                    patience_s = wait_s
                    if self._job is not None and self._job.ended.is_set():
                        patience_s = max(wait_s, RETURNING_S)
                    if time.monotonic() - started >= patience_s:
                        raise HeldError(self._held())
                    self._changed.wait(0.2)
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def _held(self) -> pb.Held:
        job = self._job
        return held(job) if job is not None else pb.Held(holder=pb.Holder(user="a job that waits, too"))

    def give_back(self, job: LeasedJob) -> None:
        """Let the next one have the cores."""
        with self._changed:
            if self._job is job:
                self._job = None
                self.idle_since = time.monotonic()
                self._changed.notify_all()

    def drain(self) -> None:
        """Take no more jobs; those that wait are told."""
        with self._changed:
            self.is_draining = True
            self._changed.notify_all()


def held(job: LeasedJob) -> pb.Held:
    """Return who has the cores, as a message."""
    return pb.Held(holder=job.holder, since=job.since)
