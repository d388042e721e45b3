"""How fast a training goes: steps, records and the wait for them over a window of time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Window:
    """What happened between two marks.

    Attributes:
        steps: optimizer updates.
        seconds: wall time, without evaluations.
        records: what this replica was given; None where no loader of polyxla's gives it.
        waited_s: the part of `seconds` in which the loop waited for a batch; None likewise.
    """

    steps: int = 0
    seconds: float = 0.0
    records: int | None = None
    waited_s: float | None = None

    @property
    def step_s(self) -> float | None:
        """Seconds of one step."""
        return self.seconds / self.steps if self.steps else None

    @property
    def wait_share(self) -> float | None:
        """Share of the time in which the loop waited for its input, 0 to 1."""
        return None if self.waited_s is None or self.seconds <= 0 else min(1.0, self.waited_s / self.seconds)

    def records_per_s(self, world_size: int) -> float | None:
        """Records of all replicas per second."""
        return None if self.records is None or self.seconds <= 0 else self.records * world_size / self.seconds

    def as_json(self, world_size: int) -> dict[str, Any]:
        """Return the rates by name."""
        return {
            "steps": self.steps,
            "step_s": self.step_s,
            "records_per_s": self.records_per_s(world_size),
            "wait_share": self.wait_share,
        }

    def __add__(self, other: Window) -> Window:
        mine, others = asdict(self), asdict(other)
        return Window(**{name: _sum(mine[name], others[name]) for name in mine})


class Pace:
    """Cuts a training into windows.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._now = self._since = clock()
        self._outside = 0.0
        self._steps = 0
        self._loader: Any = None
        self._records, self._waited_s = 0, 0.0

    def step(self) -> None:
        """Hear that a step was handed to the device. Called every step."""
        self._now = self._clock()
        self._steps += 1

    def leave_out(self) -> None:
        """Leave out the time since the last step, which went into something else."""
        now = self._clock()
        self._outside += now - self._now
        self._now = now

    def cut(self, loader: Any) -> Window:
        """Return the window that ends with the last step, and begin the next one there.

        Args:
            loader: the `polyxla.replica.loader.Loader` that feeds the steps; None for none.
        """
        window = Window(self._steps, max(0.0, self._now - self._since - self._outside), *self._input(loader))
        self._since, self._steps, self._outside = self._now, 0, 0.0
        return window

    def wait(self) -> None:
        """Let the last step end now: the device has been waited for."""
        self._now = self._clock()

    def _input(self, loader: Any) -> tuple[int | None, float | None]:
        if loader is None:
            return None, None
        # Another loader's totals have begun at 0.
        before = (self._records, self._waited_s) if loader is self._loader else (0, 0.0)
        self._loader, self._records, self._waited_s = loader, loader.records, loader.waited_s
        return loader.records - before[0], loader.waited_s - before[1]


def _sum(one: Any, other: Any) -> Any:
    # None in one window is None in all of them, but for the empty one that a sum begins with.
    return other if one is None else one if other is None else one + other
