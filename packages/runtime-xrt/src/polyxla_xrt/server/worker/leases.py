"""The queue for a worker's cores: the jobs that hold them, and those that wait."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from polyxla_xrt.proto import worker_pb2 as pb

MAX_WAITING = 32
"""Maximum number of waiting jobs."""
RETURNING_S = 30.0
"""How long every job waits until an ended job has released the cores, in seconds."""
_POLL_S = 0.2


class Job(Protocol):
    """A job that holds cores.

    Attributes:
        cores: how many.
        ended: set once it is over, which is before it returns the cores.
    """

    cores: int
    ended: threading.Event

    def describe(self) -> pb.Job:
        """Return the message that describes it."""


JobT = TypeVar("JobT", bound=Job)


class HeldError(Exception):
    """Other jobs hold the cores, and the wait is over.

    Args:
        jobs: the other jobs.
    """

    def __init__(self, jobs: Sequence[pb.Job]) -> None:
        super().__init__()
        self.jobs = jobs


class DrainingError(Exception):
    """The worker takes no more jobs."""


class ClosedError(Exception):
    """This process of the worker is about to end, and grants no cores any more."""


class QueueFullError(Exception):
    """`MAX_WAITING` jobs already wait."""


class Leases(Generic[JobT]):
    """Grants cores to jobs, first come, first served. Thread-safe.

    Args:
        cores: number of cores.
        max_jobs: the most jobs that may hold cores at once.

    Attributes:
        served: number of jobs that have had cores.
        is_draining: whether the worker refuses new jobs.
        idle_since: when the last job returned its cores, on `time.monotonic`'s clock.
    """

    def __init__(self, cores: int, max_jobs: int = 1) -> None:
        self._cores, self._max_jobs = cores, max_jobs
        self._jobs: list[JobT] = []
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()
        self.served = 0
        self.is_draining = self._is_closed = False
        self.idle_since = time.monotonic()

    @property
    def jobs(self) -> tuple[JobT, ...]:
        """The jobs that hold cores; they may have ended and not yet returned them."""
        return tuple(self._jobs)

    @property
    def waiting(self) -> int:
        """Number of waiting jobs."""
        return len(self._queue)

    def acquire(
        self,
        make: Callable[[], JobT],
        cores: int,
        wait_s: float,
        gone: Callable[[], bool],
    ) -> JobT | None:
        """Wait for cores, and create the job that gets them.

        Args:
            make: creates the job; called when the cores are free.
            cores: how many it gets.
            wait_s: longest wait for another job's end, in seconds.
            gone: returns whether the client that waits has gone.

        Returns:
            The job; None if the client has gone.

        Raises:
            HeldError: other jobs held the cores the whole time.
            DrainingError: the worker takes no more jobs.
            ClosedError: this process of the worker is about to end.
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
                    if self._is_closed:
                        raise ClosedError
                    if gone():
                        return None
                    # Waiting threads wake in any order; only the first ticket gets cores. So a job that needs
                    # many does not starve behind small ones.
                    if self._queue[0] is ticket and self._are_free(cores):
                        # If this raises, no cores are held, and they go to the next ticket.
                        self._jobs.append(job := make())
                        self.served += 1
                        return job
                    # An ended job is about to return its cores: even a client that does not wait gets them.
                    limit_s = wait_s
                    if any(job.ended.is_set() for job in self._jobs):
                        limit_s = max(wait_s, RETURNING_S)
                    if time.monotonic() - started >= limit_s:
                        holders = self.jobs
                        break
                    # The wait has a timeout, because neither `gone` nor the end of a job notifies the
                    # condition.
                    self._changed.wait(_POLL_S)
            finally:
                # This wakes the next ticket, which may be the first now.
                self._queue.remove(ticket)
                self._changed.notify_all()

        # This is outside of the lock: describing a job may take a moment. Free cores may go to an earlier
        # ticket, whose job does not exist so far.
        waits_as_well = pb.Job(holder=pb.Holder(user="a job that waits as well"))
        raise HeldError([job.describe() for job in holders] or [waits_as_well])

    def _are_free(self, cores: int) -> bool:
        held = sum(job.cores for job in self._jobs)
        return len(self._jobs) < self._max_jobs and held + cores <= self._cores

    def give_back(self, job: JobT) -> None:
        """Return a job's cores, which the next job gets."""
        with self._changed:
            # A job that had none, or has returned them, changes nothing.
            if job in self._jobs:
                self._jobs.remove(job)
                self.idle_since = time.monotonic()
                self._changed.notify_all()

    def drain(self) -> None:
        """Refuse new jobs, and those that wait."""
        with self._changed:
            self.is_draining = True
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse new jobs, and those that wait, which may ask the next process."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
