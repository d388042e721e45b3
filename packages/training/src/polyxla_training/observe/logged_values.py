"""Reading what steps log: once for all listeners, because each read waits for the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyxla.console import say

if TYPE_CHECKING:
    from polyxla.contracts.counters import Counters


class Readings:
    """Logged values as numbers, shared by the listeners of one replica.

    Args:
        counters: counts the reads, which are polyxla's own and not the person's; None where nothing can.

    Attributes:
        host_reads: reads of the device so far, as the counters counts them.
        not_finite: names whose value was NaN or infinite, each with the first step that had it.
    """

    def __init__(self, counters: Counters | None = None) -> None:
        self._counters = counters
        self._step = -1
        self._read: dict[str, float] = {}
        self.host_reads = 0
        self.not_finite: dict[str, int] = {}

    def of(self, step: int, logged: Mapping[str, Any]) -> dict[str, float]:
        """Return `logged` as numbers; the device is waited for the first time in a step only."""
        if step != self._step:
            before = self._count()
            self._step, self._read = step, {name: float(value) for name, value in logged.items()}
            self.host_reads += self._count() - before
            self.check(step, self._read)
        return self._read

    def _count(self) -> int:
        return self._counters.counts().host_reads if self._counters else 0

    def check(self, step: int, numbers: Mapping[str, float]) -> None:
        """Say which numbers are not finite, once for each name."""
        for name, number in numbers.items():
            if not math.isfinite(number) and name not in self.not_finite:
                self.not_finite[name] = step
                say(f"{name} is {number} at step {step}")
