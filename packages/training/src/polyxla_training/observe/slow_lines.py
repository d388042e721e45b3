"""The lines of a program that make it wait for its device, or leave it idle: a run's findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Kind = Literal["read", "copy", "fallback", "padding"]


TILE_ROWS = 8
"""Rows that a TPU stores and multiplies together: fewer are padded, and the padding is multiplied too.

Source: "Cloud TPU performance guide", sections "Consequences of tiling" and "Padding": tiles of 8 by 128.
"""


class SlowLine(NamedTuple):
    """A line of the user's program, and how it waits.

    Attributes:
        kind: ``read`` if the host reads a scalar of the device, ``copy`` if it copies a whole tensor, which
            no counter counts, ``fallback`` if it computes an operation in place of the device, ``padding`` if
            the batch is too small for the device; the count is then a percentage.
        op: the function of torch that does so, such as ``torch.Tensor.item``; of a fallback, the operation;
            of padding, the number of rows.
        line: ``file:line``.
    """

    kind: Kind
    op: str
    line: str

    def describe(self, count: int) -> str:
        """Return a sentence about `count` occurrences in one step."""
        if self.kind == "padding":
            return (
                f"{self.line}: a product of {self.op}, which a TPU pads to a multiple of {TILE_ROWS}: "
                f"{count}% of the work of the step's products is padding; give each replica a larger batch"
            )
        times = f"{count} time{'s' * (count > 1)} a step"
        if self.kind == "fallback":
            return f"{self.line}: {self.op} runs on the host, {times}, because the device does not support it"
        what = "reads the device" if self.kind == "read" else "copies a tensor from the device"
        return f"{self.line}: the host {what} ({self.op}) {times}, and waits for it"


class SlowLines:
    """The slow lines of all traced steps.

    Attributes:
        steps: number of traced steps.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._total: Counter[SlowLine] = Counter()

    def add(self, step: Mapping[SlowLine, int]) -> list[tuple[SlowLine, int]]:
        """Add one traced step; return its new lines with their counts."""
        self.steps += 1
        # Each line is reported once; its later occurrences only add to the counts of the report.
        new = [(line, count) for line, count in step.items() if line not in self._total]
        self._total.update(step)
        return new

    @property
    def copies_per_step(self) -> float:
        """Copies of whole tensors to the host per traced step; no counter counts them."""
        copies = sum(count for line, count in self._total.items() if line.kind == "copy")
        return copies / self.steps if self.steps else 0.0

    def as_json(self) -> list[dict[str, Any]]:
        """Return every line with its mean count per traced step, the most frequent first."""
        return [
            # Per traced step, because only a few steps of a run are traced.
            {**line._asdict(), "per_traced_step": round(count / self.steps, 3)}
            for line, count in self._total.most_common()
        ]
