"""The speed of a training: steps, records, and the wait for them, in windows of time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ThroughputWindow:
    """The steps between two points in time.

    Attributes:
        steps: number of optimizer updates.
        seconds: wall time, without evaluations.
        records: number of records that this replica received; None without a loader of polyxla's.
        waited_s: the part of `seconds` in which the loop waited for a batch; None likewise.
    """

    steps: int = 0
    seconds: float = 0.0
    records: int | None = None
    waited_s: float | None = None

    @property
    def step_s(self) -> float | None:
        """Duration of one step, in seconds."""
        return self.seconds / self.steps if self.steps else None

    @property
    def wait_share(self) -> float | None:
        """Share of the time in which the loop waited for its input, 0 to 1."""
        return None if self.waited_s is None or self.seconds <= 0 else min(1.0, self.waited_s / self.seconds)

    def records_per_s(self, world_size: int) -> float | None:
        """Return the records of all replicas per second."""
        return None if self.records is None or self.seconds <= 0 else self.records * world_size / self.seconds

    def as_json(self, world_size: int) -> dict[str, Any]:
        """Return the rates by name."""
        return {
            "steps": self.steps,
            "step_s": self.step_s,
            "records_per_s": self.records_per_s(world_size),
            "wait_share": self.wait_share,
        }

    def __add__(self, other: ThroughputWindow) -> ThroughputWindow:
        mine, others = asdict(self), asdict(other)
        return ThroughputWindow(**{name: _sum(mine[name], others[name]) for name in mine})


class ThroughputMeter:
    """Divides a training into windows.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last_step_at = self._window_since = clock()
        self._excluded_s = 0.0
        self._steps = 0
        self._loader: Any = None
        self._records, self._waited_s = 0, 0.0

    def step(self) -> None:
        """Record that a step was submitted to the device. Called every step."""
        self._last_step_at = self._clock()
        self._steps += 1

    def exclude(self) -> None:
        """Exclude the time since the last step from the window: an evaluation took it."""
        now = self._clock()
        self._excluded_s += now - self._last_step_at
        self._last_step_at = now

    def extend_step(self) -> None:
        """Make the last step end now, because the device has been waited for."""
        self._last_step_at = self._clock()

    def next_window(self, loader: Any) -> ThroughputWindow:
        """Return the window up to the last step, and begin the next one there.

        Args:
            loader: the `polyxla.replica.loader.Loader` of the steps, or None.
        """
        seconds = max(0.0, self._last_step_at - self._window_since - self._excluded_s)
        window = ThroughputWindow(self._steps, seconds, *self._input(loader))
        self._window_since, self._steps, self._excluded_s = self._last_step_at, 0, 0.0
        return window

    def _input(self, loader: Any) -> tuple[int | None, float | None]:
        if loader is None:
            return None, None
        # The totals of another loader began at 0.
        before = (self._records, self._waited_s) if loader is self._loader else (0, 0.0)
        self._loader, self._records, self._waited_s = loader, loader.records, loader.waited_s
        return loader.records - before[0], loader.waited_s - before[1]


def _sum(one: Any, other: Any) -> Any:
    # None in one window is None in all of them, except in the empty one that a sum begins with.
    return other if one is None else one if other is None else one + other
