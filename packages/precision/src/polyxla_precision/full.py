"""Full precision: float32 weights, float32 arithmetic."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from polyxla_precision.policy import Policy


class Full32(Policy):
    """``32-true``: every floating-point parameter, buffer and input is float32."""

    name = "32-true"

    def __init__(self) -> None:
        super().__init__()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context that changes nothing."""
        return nullcontext()
