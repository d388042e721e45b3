"""Logged tensors as numbers: read once for all listeners, because each read waits for the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyxla.plugin import say

if TYPE_CHECKING:
    from polyxla.plugin import Counters


class LoggedValues:
    """The values that steps log, as numbers; the listeners of one replica share it.

    Args:
        counters: counts the reads, which are polyxla's and not the user's; None if the runtime has none.
        every_n_steps: interval at which they are read, which waits for the device.

    Attributes:
        host_reads: number of reads of the device so far, as the counters count them.
        not_finite: names whose value was NaN or infinite, each with the first such step.
    """

    def __init__(self, counters: Counters | None = None, every_n_steps: int = 50) -> None:
        self._counters, self._every = counters, every_n_steps
        self._first: int | None = None
        self._step = -1
        self._values: dict[str, float] = {}
        self.host_reads = 0
        self.not_finite: dict[str, int] = {}

    def is_due(self, step: int) -> bool:
        """Return whether the values of a step are read: those of the run's first step, and every n-th."""
        if self._first is None:
            self._first = step
        return step == self._first or step % self._every == 0

    def read(self, step: int, logged: Mapping[str, Any]) -> dict[str, float]:
        """Return `logged` as numbers. Only the first call in a step waits for the device."""
        if step != self._step:
            before = self._count()
            self._step, self._values = step, {name: float(value) for name, value in logged.items()}
            self.host_reads += self._count() - before
            self.check(step, self._values)
        return self._values

    def _count(self) -> int:
        return self._counters.counts().host_reads if self._counters else 0

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Print the values that are not finite, once for each name."""
        for name, value in values.items():
            if not math.isfinite(value) and name not in self.not_finite:
                self.not_finite[name] = step
                say(f"{name} is {value} at step {step}")
