"""The queue for a worker's cores: the job that holds them, and those that wait."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.server.worker.leased_job import LeasedJob

MAX_WAITING = 32
"""Maximum number of waiting jobs."""
RETURNING_S = 30.0
"""How long every job waits until an ended job has released the cores, in seconds."""
_POLL_S = 0.2


class HeldError(Exception):
    """Another job holds the cores, and the wait is over.

    Args:
        held: the other job.
    """

    def __init__(self, held: pb.Held) -> None:
        super().__init__()
        self.held = held


class DrainingError(Exception):
    """The worker takes no more jobs."""


class QueueFullError(Exception):
    """`MAX_WAITING` jobs already wait."""


class Leases:
    """Grants the cores to one job at a time, first come, first served. Thread-safe.

    Attributes:
        served: number of jobs that have had the cores.
        is_draining: whether the worker refuses new jobs.
        idle_since: when the last job returned the cores, on `time.monotonic`'s clock.
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
        """The job that holds the cores, or has ended and not yet released them."""
        return self._job

    @property
    def waiting(self) -> int:
        """Number of waiting jobs."""
        return len(self._queue)

    def acquire(
        self,
        make: Callable[[], LeasedJob],
        wait_s: float,
        gone: Callable[[], bool],
    ) -> LeasedJob | None:
        """Wait for the cores, and create the job that gets them.

        Args:
            make: creates the job; called when the cores are free.
            wait_s: longest wait for another job's end, in seconds.
            gone: returns whether the client that waits has gone.

        Returns:
            The job; None if the client has gone.

        Raises:
            HeldError: another job held the cores the whole time.
            DrainingError: the worker takes no more jobs.
            QueueFullError: too many jobs already wait.
        """
        started, ticket = time.monotonic(), object()
        with self._changed:
            if len(self._queue) >= MAX_WAITING:
                raise QueueFullError
            self._queue.append(ticket)
            try:
                while True:
                    if self.is_draining:
                        raise DrainingError
                    if gone():
                        return None
                    # Waiting threads wake in any order; only the first ticket gets the cores.
                    if self._job is None and self._queue[0] is ticket:
                        # If this raises, `_job` is still None, and the cores go to the next ticket.
                        self._job = make()
                        self.served += 1
                        return self._job
                    # An ended job is about to release the cores: even a client that does not wait gets them.
                    limit_s = wait_s
                    if self._job is not None and self._job.ended.is_set():
                        limit_s = max(wait_s, RETURNING_S)
                    if time.monotonic() - started >= limit_s:
                        raise HeldError(self._held())
                    # The wait has a timeout, because neither `gone` nor the end of a job notifies the
                    # condition.
                    self._changed.wait(_POLL_S)
            finally:
                # This wakes the next ticket, which may be the first now.
                self._queue.remove(ticket)
                self._changed.notify_all()

    def _held(self) -> pb.Held:
        job = self._job
        # The cores may be free and yet go to an earlier ticket, whose job does not exist so far.
        return held(job) if job is not None else pb.Held(holder=pb.Holder(user="a job that waits as well"))

    def give_back(self, job: LeasedJob) -> None:
        """Return a job's cores, which the next job gets."""
        with self._changed:
            # An old job must not return cores that another job holds by now.
            if self._job is job:
                self._job = None
                self.idle_since = time.monotonic()
                self._changed.notify_all()

    def drain(self) -> None:
        """Refuse new jobs, and those that wait."""
        with self._changed:
            self.is_draining = True
            self._changed.notify_all()


def held(job: LeasedJob) -> pb.Held:
    """Return the message that describes the job that holds the cores."""
    return pb.Held(holder=job.holder, since=job.since)
