"""One replica's counters from step to step: compilations, host reads, fallbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from polyxla.plugin import say
from polyxla_training.observe.compilations import StepFacts
from polyxla_training.observe.tracing.trace_schedule import TraceSchedule

if TYPE_CHECKING:
    from polyxla.plugin import Counters, Counts, Loader, Memory
    from polyxla_training.observe.compilations import Compilation, CompilationTracker
    from polyxla_training.observe.logged_values import LoggedValues
    from polyxla_training.observe.summary import Summary


MAX_IDLE_WAITS = 16
"""How often the counters may be settled for nothing: a training whose batches always have another shape, and
compile nothing new, must not wait for the device in every step."""


class StepCounters:
    """Compares the counters after every step with those before it, and traces steps that need explaining.

    Args:
        counters: the counters.
        logged_values: counts the reads of polyxla itself, which are subtracted.
        compilations: explains compilations.
        is_shared: whether other replicas are threads of this process, which are counted too.
        on_tpu: whether the device is a TPU, also an emulated one.
    """

    def __init__(
        self,
        counters: Counters,
        logged_values: LoggedValues,
        compilations: CompilationTracker,
        *,
        is_shared: bool = False,
        on_tpu: bool = False,
    ) -> None:
        self._counters, self._logged_values = counters, logged_values
        self.compilations = compilations
        self._first = self._last = counters.counts()
        self._fallbacks_before = counters.fallbacks()
        self._own_reads = logged_values.host_reads
        self._user_reads = 0
        self._fewest_pieces = self._usual_executions = 0
        self._idle_waits = 0
        self._tracing = TraceSchedule(counters, is_shared=is_shared, on_tpu=on_tpu)

    @property
    def flops_per_step(self) -> int | None:
        """Floating-point operations in one replica's step."""
        return self._tracing.flops_per_step

    @property
    def chip(self) -> str | None:
        """The kind of chip, if it is known."""
        return self._counters.chip

    def step(
        self,
        step: int,
        loader: Loader | None,
        write: Callable[..., None],
        facts: StepFacts = StepFacts(),  # noqa: B008
    ) -> Compilation | None:
        """Record a finished step: print and `write` findings, return what it compiled. Called every step."""
        # Tracing ends first and begins again last, so it never sees the work in between.
        new = self._tracing.finish_step()
        is_eager = self._counters.is_eager
        delta = self._delta(may_compile=is_eager and self.compilations.may_compile(loader))
        for finding, count in new:
            say(finding.describe(count))
            write("finding", step=step, count=count, **finding._asdict())
        reads = self._reads_of_user(delta)
        self._user_reads += reads
        is_cut = self._is_cut(delta.executions - reads)
        compilation = self.compilations.step(step, delta, loader, self._describe_cut(delta.executions), facts)
        self._tracing.begin_step(reads, is_cut=is_cut)
        return compilation

    def _describe_cut(self, executions: int) -> str | None:
        if self._counters.is_eager:
            return None
        usual, self._usual_executions = self._usual_executions, executions
        if self._tracing.cut_at:
            return f"the host's read at {self._tracing.cut_at} cuts the step in pieces"
        return f"the step ran in {executions} pieces, not {usual}" if 0 < usual < executions else None

    def between_steps(self, step: int, loader: Loader | None) -> Compilation | None:
        """Record metrics between two steps; return what was compiled since the last step."""
        delta = self._delta(may_compile=self.compilations.is_evaluation(loader))
        # Counted off here: the reads of an evaluation are not those of the next step.
        self._reads_of_user(delta)
        return self.compilations.between_steps(step, delta, loader)

    def _delta(self, *, may_compile: bool) -> Counts:
        last, counts = self._last, self._counters.counts()
        if counts.compiles > last.compiles or (may_compile and self._idle_waits < MAX_IDLE_WAITS):
            self._counters.settle()
            counts = self._counters.counts()
            self._idle_waits += counts.compiles == last.compiles
        self._last = counts
        return counts.since(last)

    def _reads_of_user(self, delta: Counts) -> int:
        own, self._own_reads = self._own_reads, self._logged_values.host_reads
        return max(0, delta.host_reads - (self._own_reads - own))

    def _is_cut(self, pieces: int) -> bool:
        """Return whether the step ran in more pieces than others; a copy to the host cuts it so."""
        if self._counters.is_eager:
            return False
        self._fewest_pieces = max(1, min(pieces, self._fewest_pieces or pieces))
        return pieces > self._fewest_pieces

    def memory(self) -> Memory | None:
        """Return the device's memory."""
        return self._counters.memory()

    def close(self) -> list[dict[str, Any]]:
        """Stop tracing; return all findings."""
        self._tracing.close()
        return self._tracing.findings.as_json()

    def add_to(self, summary: Summary) -> None:
        """Fill in the counts."""
        delta = self._counters.counts().since(self._first)
        before = self._fallbacks_before
        fallbacks = {name: count - before.get(name, 0) for name, count in self._counters.fallbacks().items()}
        summary.compiles, summary.compile_s = self.compilations.total, self.compilations.seconds
        summary.cache_hits, summary.cache_misses = delta.cache_hits, delta.cache_misses
        summary.fallbacks = {name: count for name, count in fallbacks.items() if count}
        if summary.steps:
            copies = self._tracing.findings.copies_per_step
            summary.reads_per_step = self._user_reads / summary.steps + copies
        summary.flops_per_step, summary.chip = self.flops_per_step, self.chip
