"""Decides which steps are traced: tracing watches every call of torch, which is too slow for all of them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from polyxla_training.observe.tracing.findings import Finding, Findings

if TYPE_CHECKING:
    from polyxla.plugin import Counters

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
        findings: the findings so far.
        flops_per_step: floating-point operations in the last step that was traced as a whole.
        cut_at: the line that cut the last step, so that a program was compiled inside it; None if none did.
    """

    def __init__(self, counters: Counters, *, is_shared: bool = False, on_tpu: bool = False) -> None:
        # Imported here, in a replica, because it imports torch.
        from polyxla_training.observe.tracing.tracer import Tracer

        self._tracer = Tracer(counters, is_shared=is_shared, on_tpu=on_tpu)
        self._steps = 0
        self._traced_steps = 0
        self._explained_reads = 0
        # Numbers of steps: the latest suspect one, and the next to trace; 0 for none.
        self._suspect = 0
        self._next_traced = 0
        self.findings = Findings()
        self.flops_per_step: int | None = None
        self.cut_at: str | None = None
        self._start_tracer()

    def _start_tracer(self) -> None:
        # torch.compile would compile other programs while it is traced.
        if self._traced_steps < MAX_TRACED_STEPS and not is_torch_compiled():
            self._traced_steps += 1
            self._tracer.start()

    def finish_step(self) -> list[tuple[Finding, int]]:
        """Stop tracing the step that has ended; return its new findings. Called every step."""
        self._steps += 1
        self.cut_at = None
        if not self._tracer.is_on or not self._tracer.stop():
            return []
        self.cut_at = self._tracer.compiled_at
        self.flops_per_step = self._tracer.flops
        found = self._tracer.found
        # No counter counts the other kinds.
        explained = (count for one, count in found.items() if one.kind in ("read", "fallback"))
        self._explained_reads = sum(explained)
        return self.findings.add(found)

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


def is_torch_compiled() -> bool:
    """Return whether torch.compile has compiled a function in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return False
    # With fullgraph=True, only the second counter grows.
    counters = dynamo.counters
    return bool(counters["frames"]["total"] or counters["stats"]["unique_graphs"])
