"""How much memory a job may hold on a worker."""

from __future__ import annotations

import threading


class Budget:
    """Counts the bytes of a job's arrays, of all its sessions.

    Args:
        limit_bytes: how many it may hold.
        job: who it is, to be named when it asks for more.
    """

    def __init__(self, limit_bytes: int, job: str) -> None:
        self._limit_bytes = limit_bytes
        self._job = job
        self._lock = threading.Lock()
        self.held_bytes = 0

    def take(self, size: int) -> str | None:
        """Count an array, or say why there is no room for it."""
        with self._lock:
            if self.held_bytes + size > self._limit_bytes:
                limit, held, more = (number / 2**20 for number in (self._limit_bytes, self.held_bytes, size))
                return (
                    f"the job of {self._job} may hold {limit:,.0f} MiB of this worker's memory, holds "
                    f"{held:,.0f} MiB, and asks for {more:,.1f} MiB more"
                )
            self.held_bytes += size
        return None

    def give_back(self, size: int) -> None:
        """Count an array no more."""
        with self._lock:
            self.held_bytes -= size
