"""One replica's counters and logged values from step to step, and the choice of the steps that are traced."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from polyxla.plugin import say
from polyxla_training.observe.compilations import StepFacts, is_torch_compiled
from polyxla_training.observe.slow_lines import SlowLine, SlowLines

if TYPE_CHECKING:
    from polyxla.plugin import Counters, Counts, Loader, Memory
    from polyxla_training.observe.compilations import Compilation, CompilationTracker
    from polyxla_training.observe.performance import Summary


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
            # The reads here are polyxla's, so they are left out of what is reported.
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


FIRST_STEPS = 3
"""Number of steps that are always traced; the first of them compile, which takes far longer than tracing."""
MAX_TRACED_STEPS = 12
"""Maximum number of traced steps in a run."""


class TraceSchedule:
    """Traces the first steps, and later those in which another read is likely.

    A step with a read that tracing has not explained is suspect, and so that the read is traced when it
    comes again, the schedule guesses its period: first it traces the next step; after a second suspect step
    it traces the one as far ahead as those two were apart. Reads every n steps are found so for any n.

    Args:
        counters: counts the reads.
        is_shared: whether other replicas are threads of this process, whose reads are counted too.
        on_tpu: whether the device is a TPU, also an emulated one.

    Attributes:
        slow_lines: those found so far.
        flops_per_step: floating-point operations in the last step that was traced as a whole.
        cut_at: the line that cut the last step, so that a program was compiled inside it; None if none did.
    """

    def __init__(self, counters: Counters, *, is_shared: bool = False, on_tpu: bool = False) -> None:
        # Imported here, in a replica, because it imports torch.
        from polyxla_training.observe.tracer import Tracer

        self._tracer = Tracer(counters, is_shared=is_shared, on_tpu=on_tpu)
        self._steps = 0
        self._traced_steps = 0
        self._explained_reads = 0
        # Numbers of steps: the latest suspect one, and the next to trace; 0 for none.
        self._suspect = 0
        self._next_traced = 0
        self.slow_lines = SlowLines()
        self.flops_per_step: int | None = None
        self.cut_at: str | None = None
        self._start_tracer()

    def _start_tracer(self) -> None:
        # Not with torch.compile, which would compile other programs while a function mode is active.
        if self._traced_steps < MAX_TRACED_STEPS and not is_torch_compiled():
            self._traced_steps += 1
            self._tracer.start()

    def finish_step(self) -> list[tuple[SlowLine, int]]:
        """Stop tracing the step that has ended; return its new slow lines. Called every step."""
        self._steps += 1
        self.cut_at = None
        if not self._tracer.is_on or not self._tracer.stop():
            return []
        self.cut_at = self._tracer.compiled_at
        self.flops_per_step = self._tracer.flops
        found = self._tracer.found
        # Reads and fallbacks increase the counter of reads; the other kinds are in no counter.
        explained = (count for line, count in found.items() if line.kind in ("read", "fallback"))
        self._explained_reads = sum(explained)
        return self.slow_lines.add(found)

    def begin_step(self, reads: int, *, is_cut: bool) -> None:
        """Trace the coming step if it is due. Called every step, after `finish_step`.

        Args:
            reads: number of times the host read the device in the last step, other than for polyxla.
            is_cut: whether something else cut the last step in pieces.
        """
        if reads > self._explained_reads or is_cut:
            period = self._steps - self._suspect if self._suspect else 1
            self._suspect, self._next_traced = self._steps, self._steps + period
        if self._steps < FIRST_STEPS or self._next_traced == self._steps + 1:
            self._start_tracer()

    def close(self) -> None:
        """Stop tracing."""
        self._tracer.stop()


MAX_IDLE_WAITS = 16
"""Number of waits for the counters that may turn out to be needless. A training whose batches always have
another shape, and compile nothing new, must not wait for the device in every step."""


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
        """Record a step, print and `write` its slow lines; return what it compiled. Called every step."""
        # Tracing ends first and begins again last, so it never sees the work of this method.
        new = self._tracing.finish_step()
        is_eager = self._counters.is_eager
        delta = self._delta(may_compile=is_eager and self.compilations.may_compile(loader))
        for line, count in new:
            say(line.describe(count))
            write("finding", step=step, count=count, **line._asdict())
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
        # Taken out of the counts here, so that the reads of an evaluation do not count for the next step.
        self._reads_of_user(delta)
        return self.compilations.between_steps(step, delta, loader)

    def _delta(self, *, may_compile: bool) -> Counts:
        last, counts = self._last, self._counters.counts()
        if counts.compiles > last.compiles or (may_compile and self._idle_waits < MAX_IDLE_WAITS):
            # Programs are compiled in the background, so counts may lag: wait until this step's are in them.
            self._counters.settle()
            counts = self._counters.counts()
            self._idle_waits += counts.compiles == last.compiles
        self._last = counts
        return counts.since(last)

    def _reads_of_user(self, delta: Counts) -> int:
        own, self._own_reads = self._own_reads, self._logged_values.host_reads
        # At least 0: with several replicas as threads, another one's reads may be counted in between.
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
        """Stop tracing; return all slow lines."""
        self._tracing.close()
        return self._tracing.slow_lines.as_json()

    def add_to(self, summary: Summary) -> None:
        """Fill in the counts."""
        delta = self._counters.counts().since(self._first)
        before = self._fallbacks_before
        fallbacks = {name: count - before.get(name, 0) for name, count in self._counters.fallbacks().items()}
        summary.compiles, summary.compile_s = self.compilations.total, self.compilations.seconds
        summary.cache_hits, summary.cache_misses = delta.cache_hits, delta.cache_misses
        summary.fallbacks = {name: count for name, count in fallbacks.items() if count}
        if summary.steps:
            copies = self._tracing.slow_lines.copies_per_step
            summary.reads_per_step = self._user_reads / summary.steps + copies
        summary.flops_per_step, summary.chip = self.flops_per_step, self.chip
