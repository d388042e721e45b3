"""Decides which steps are traced: watching every call of torch costs, so it is done for a few steps only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyxla_training.observe.findings import Finding, Findings
from polyxla_training.observe.torch_compiled import is_torch_compiled

if TYPE_CHECKING:
    from polyxla.contracts.counters import Counters

FIRST_STEPS = 3
"""Steps that are traced in any case; the first of them compile, which takes far longer."""
MOST_STEPS = 12
"""Steps that are traced at most."""


class Watch:
    """Traces the first steps, and later those in which a read is to be expected.

    A read that tracing has not explained lets the next step be traced; if it comes again later, the step that
    is as far off as the last two such reads were apart.

    Args:
        counters: counts the reads.
        is_shared: whether other replicas are threads of this process, whose reads are counted too.

    Attributes:
        findings: what was found.
        flops_per_step: floating-point operations of the last step that was traced whole.
        cut_at: the line that cut and compiled a program inside the step before; None if none did.
    """

    def __init__(self, counters: Counters, *, is_shared: bool = False) -> None:
        # Here, because torch is: in a replica.
        from polyxla_training.observe.tracer import Tracer

        self._tracer = Tracer(counters, is_shared=is_shared)
        self._begun = 0
        self._steps = 0
        self._suspected_at = 0
        self._next = 0
        self._explained = 0
        self.findings = Findings()
        self.flops_per_step: int | None = None
        self.cut_at: str | None = None
        self._start()

    def _start(self) -> None:
        # torch.compile makes other programs while it is watched.
        if self._begun < MOST_STEPS and not is_torch_compiled():
            self._begun += 1
            self._tracer.start()

    def step(self) -> list[tuple[Finding, int]]:
        """Hear that a step has ended; return what was found in it for the first time. Called every step."""
        self._steps += 1
        self.cut_at = None
        if not self._tracer.is_on or not self._tracer.stop():
            return []
        self.cut_at = self._tracer.compiled_at
        self.flops_per_step = self._tracer.flops
        found = self._tracer.found
        self._explained = sum(count for finding, count in found.items() if finding.kind != "copy")
        return self.findings.add(found)

    def go_on(self, reads: int, *, is_cut: bool) -> None:
        """Prepare for the next step.

        Args:
            reads: how often the host read the device in this one, other than for polyxla.
            is_cut: whether something else cut the step in pieces.
        """
        if reads > self._explained or is_cut:
            self._next = self._steps + (self._steps - self._suspected_at if self._suspected_at else 1)
            self._suspected_at = self._steps
        if self._steps < FIRST_STEPS or self._next == self._steps + 1:
            self._start()

    def close(self) -> None:
        """Watch no longer."""
        self._tracer.stop()
