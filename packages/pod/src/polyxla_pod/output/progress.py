"""A host's progress, read from the lines that it prints."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|inf)"
_STEP = re.compile(r"\bsteps?\b\s*[=:#]?\s*(\d{1,18})(?![\d.]*\s*(?:s|ms|it)\b)", re.IGNORECASE)
_LOSS = re.compile(rf"\bloss\b\s*[=:]?\s*({_NUMBER})", re.IGNORECASE)
_RATE = re.compile(rf"({_NUMBER})\s*(?:steps|it)/s", re.IGNORECASE)


@dataclass
class Progress:
    """The latest numbers of a host.

    Attributes:
        step: number of updates; None if no line said it.
        loss: the loss as it was printed.
        steps_per_s: as printed, or between the last two lines with a step.
        last_line: the last line.
    """

    step: int | None = None
    loss: str | None = None
    steps_per_s: float | None = None
    last_line: str = ""
    _step_s: float = 0.0

    def read(self, text: str, now_s: float) -> None:
        """Take the numbers in a line."""
        if text.strip():
            self.last_line = text
        if match := _LOSS.search(text):
            self.loss = match[1]
        if match := _STEP.search(text):
            self._advance(int(match[1]), now_s)
        if match := _RATE.search(text):
            self.steps_per_s = float(match[1])

    def _advance(self, step: int, now_s: float) -> None:
        if self.step is not None and step > self.step and now_s > self._step_s:
            self.steps_per_s = (step - self.step) / (now_s - self._step_s)
        if step != self.step:
            self.step, self._step_s = step, now_s
