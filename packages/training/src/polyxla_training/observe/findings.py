"""What makes a training wait for its device, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Kind = Literal["read", "copy", "fallback"]


class Finding(NamedTuple):
    """One line of the person's program and what it does.

    Attributes:
        kind: ``read`` for the host reading a scalar of the device, ``copy`` for its copying a whole
            tensor, which no counter tells, ``fallback`` for the host computing in its place.
        op: the function of torch that did it, such as ``torch.Tensor.item``; of a fallback, the operation.
        line: ``file:line``.
    """

    kind: Kind
    op: str
    line: str

    def said(self, count: int) -> str:
        """Return a sentence about `count` times in one step."""
        times = f"{count} time{'s' * (count > 1)} a step"
        if self.kind == "fallback":
            return f"{self.line}: {self.op} runs on the host, {times}, because the device has no form of it"
        what = "reads the device" if self.kind == "read" else "copies a tensor from the device"
        return f"{self.line}: the host {what} ({self.op}) {times}, and waits for it"


class Findings:
    """All that was found so far, per line.

    Attributes:
        steps: how many steps were traced.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._total: Counter[Finding] = Counter()

    def add(self, step: Mapping[Finding, int]) -> list[tuple[Finding, int]]:
        """Take one traced step's; return those that are new, with their counts."""
        self.steps += 1
        new = [(finding, count) for finding, count in step.items() if finding not in self._total]
        self._total.update(step)
        return new

    @property
    def copies_per_step(self) -> float:
        """Copies of whole tensors to the host in a traced step, which no counter tells."""
        copies = sum(count for finding, count in self._total.items() if finding.kind == "copy")
        return copies / self.steps if self.steps else 0.0

    def as_json(self) -> list[dict[str, Any]]:
        """Return every finding with its mean number in a traced step, the most frequent first."""
        return [
            {**finding._asdict(), "per_traced_step": round(count / self.steps, 3)}
            for finding, count in self._total.most_common()
        ]
