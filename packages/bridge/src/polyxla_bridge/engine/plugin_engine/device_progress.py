"""What the stall watchdog knows of a job whose replicas are a plugin's devices."""

from __future__ import annotations

from typing import Protocol

from polyxla_bridge.engine.stall_watchdog import Progress


class DeviceProgress(Progress, Protocol):
    """What the processes of a job on a plugin's devices tell each other. Any thread may use it.

    An accelerator does not show whether its program computes or waits. All programs compute if no device of
    the job is without one, and a process sees only its own devices.
    """

    def exchange(self, is_full: bool) -> bool:
        """Tell the other processes whether each device here has a program; return whether each of all has."""

    def retire(self, replica: int) -> None:
        """Record that a replica will run no more programs."""


class OwnProgress(DeviceProgress):
    """The progress of a job in one process."""

    def __init__(self) -> None:
        self._beats = 0
        self._retired: set[int] = set()

    def beat(self) -> None:
        """Count a heartbeat."""
        self._beats += 1

    def heartbeats(self) -> dict[str, str]:
        """Return the number of heartbeats, by the only process."""
        return {"0": str(self._beats)}

    def retired(self) -> frozenset[int]:  # noqa: D102  (see `Progress`)
        return frozenset(self._retired)

    def exchange(self, is_full: bool) -> bool:
        """Return the same: there is no other process."""
        return is_full

    def retire(self, replica: int) -> None:  # noqa: D102  (see `DeviceProgress`)
        self._retired.add(replica)
