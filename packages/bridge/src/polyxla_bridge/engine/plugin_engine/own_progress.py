"""What the stall watchdog knows of a job whose replicas are all in one process."""

from __future__ import annotations


class OwnProgress:
    """Heartbeats and returned replicas of a job in one process. Any thread may use it."""

    def __init__(self) -> None:
        self._beats = 0
        self._retired: frozenset[int] = frozenset()

    def beat(self) -> None:
        """Record that this process compiles or computes."""
        self._beats += 1

    def heartbeats(self) -> dict[str, str]:
        """Return the number of heartbeats, by the only process."""
        return {"0": str(self._beats)}

    def retire(self, replica: int) -> None:
        """Record that a replica will run no more programs."""
        self._retired |= {replica}

    def retired(self) -> frozenset[int]:
        """Return the replicas that will run no more programs."""
        return self._retired
