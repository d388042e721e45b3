"""One replica's counters from step to step: compilations, reads by the host, fallbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from polyxla.console import say
from polyxla_training.observe.trace_schedule import Watch

if TYPE_CHECKING:
    from polyxla.contracts.counters import Counters, Counts, Memory
    from polyxla.replica.loader import Loader
    from polyxla_training.observe.compilations import Compilations, Compiled
    from polyxla_training.observe.logged_values import Readings
    from polyxla_training.observe.summary import Summary


class StepCounters:
    """Takes the difference after every step, and looks closer where there is one.

    Args:
        counters: the counters.
        readings: what polyxla itself reads.
        compilations: explains those.
        is_shared: whether other replicas are threads of this process, which are counted too.
    """

    def __init__(
        self, counters: Counters, readings: Readings, compilations: Compilations, *, is_shared: bool = False
    ) -> None:
        self._counters, self._readings = counters, readings
        self.compilations = compilations
        self._first = self._last = counters.counts()
        self._fallbacks_before = counters.fallbacks()
        self._own = readings.host_reads
        self._reads = 0
        self._fewest = self._executions = 0
        self._watch = Watch(counters, is_shared=is_shared)

    @property
    def flops_per_step(self) -> int | None:
        """Floating-point operations of one replica's step."""
        return self._watch.flops_per_step

    @property
    def chip(self) -> str | None:
        """What the device is, where that is known."""
        return self._counters.chip

    def step(self, step: int, loader: Loader | None, write: Callable[..., None]) -> Compiled | None:
        """Hear of a step; say and `write` what was found; return what it compiled. Called every step."""
        new = self._watch.step()
        delta = self._delta()
        for finding, count in new:
            say(finding.said(count))
            write("finding", step=step, count=count, **finding._asdict())
        reads = self._persons(delta)
        self._reads += reads
        is_cut = self._is_cut(delta.executions - reads)
        cut = self._cut(delta.executions)
        compiled = self.compilations.step(step, delta, loader, cut)
        self._watch.go_on(reads, is_cut=is_cut)
        return compiled

    def _cut(self, executions: int) -> str | None:
        if self._watch.cut_at:
            self._executions = executions
            return f"the host's read at {self._watch.cut_at} cuts the step in pieces"
        usual, self._executions = self._executions, executions
        return f"the step ran in {executions} pieces, not {usual}" if 0 < usual < executions else None

    def between(self, step: int, loader: Loader | None) -> Compiled | None:
        """Hear of metrics between two steps; return what was compiled since the last one."""
        delta = self._delta()
        self._persons(delta)
        return self.compilations.between(step, delta, loader)

    def _delta(self) -> Counts:
        last, self._last = self._last, self._counters.counts()
        return self._last.since(last)

    def _persons(self, delta: Counts) -> int:
        own, self._own = self._own, self._readings.host_reads
        return max(0, delta.host_reads - (self._own - own))

    def _is_cut(self, pieces: int) -> bool:
        """Tell whether the step was run in more pieces than others, as a copy to the host makes it."""
        self._fewest = max(1, min(pieces, self._fewest or pieces))
        return pieces > self._fewest

    def memory(self) -> Memory | None:
        """Return the device's memory."""
        return self._counters.memory()

    def close(self) -> list[dict[str, Any]]:
        """Watch no longer; return all findings."""
        self._watch.close()
        return self._watch.findings.as_json()

    def add_to(self, summary: Summary) -> None:
        """Fill in what was counted."""
        delta = self._counters.counts().since(self._first)
        before = self._fallbacks_before
        fallbacks = {name: count - before.get(name, 0) for name, count in self._counters.fallbacks().items()}
        summary.compiles, summary.compile_s = self.compilations.total, self.compilations.seconds
        summary.cache_hits, summary.cache_misses = delta.cache_hits, delta.cache_misses
        summary.fallbacks = {name: count for name, count in fallbacks.items() if count}
        if summary.steps:
            summary.reads_per_step = self._reads / summary.steps + self._watch.findings.copies_per_step
        summary.flops_per_step, summary.chip = self.flops_per_step, self.chip
