"""The limit of a job's memory on a worker."""

from __future__ import annotations

import threading


class MemoryBudget:
    """Counts the bytes of a job's arrays in all its sessions. Thread-safe.

    Args:
        limit_bytes: the limit.
        job: the owner of the job, for messages.

    Attributes:
        held_bytes: the size of the job's arrays.
    """

    def __init__(self, limit_bytes: int, job: str) -> None:
        self._limit_bytes = limit_bytes
        self._job = job
        self._lock = threading.Lock()
        self.held_bytes = 0

    def take(self, size: int) -> str | None:
        """Count an array, or return why it exceeds the limit."""
        with self._lock:
            if self.held_bytes + size > self._limit_bytes:
                limit, held, more = (number / 2**20 for number in (self._limit_bytes, self.held_bytes, size))
                return (
                    f"the job of {self._job} may hold {limit:,.0f} MiB of this worker's memory, holds "
                    f"{held:,.0f} MiB, and requests {more:,.1f} MiB more"
                )
            self.held_bytes += size
        return None

    def give_back(self, size: int) -> None:
        """Remove an array from the count."""
        with self._lock:
            self.held_bytes -= size
