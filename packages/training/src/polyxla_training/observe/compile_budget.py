"""How many programs a training may compile."""

from __future__ import annotations

from polyxla.console import say
from polyxla.errors import PolyxlaError, UsageError


class CompileBudgetError(PolyxlaError):
    """A training compiled more programs than it was allowed to."""


class Budget:
    """Counts compilations that nobody expected.

    Args:
        allowed: how many there may be; None for any number.
        on_budget: ``warn`` or ``raise``, when there are more.

    Attributes:
        spent: how many there were.

    Raises:
        UsageError: `on_budget` is neither, or `allowed` is negative.
    """

    def __init__(self, allowed: int | None, on_budget: str) -> None:
        if on_budget not in {"warn", "raise"}:
            raise UsageError(
                f"{on_budget!r} is nothing that can be done about too many compilations",
                where=f"on_budget={on_budget!r}",
                fix="Write on_budget='warn' or 'raise'.",
            )
        if allowed is not None and allowed < 0:
            raise UsageError(
                "a budget cannot be negative",
                where=f"compile_budget={allowed}",
                fix="Write compile_budget=0 to allow none.",
            )
        self.allowed = allowed
        self.spent = 0
        self._is_strict = on_budget == "raise"
        self._has_warned = False

    def spend(self, compiles: int, why: str) -> None:
        """Count compilations.

        Args:
            compiles: how many.
            why: what the last of them was for, for the message.

        Raises:
            CompileBudgetError: there were more than allowed, and that is an error here.
        """
        self.spent += compiles
        if self.allowed is None or self.spent <= self.allowed:
            return
        text = (
            f"{self.spent} programs were compiled after the first steps, and compile_budget={self.allowed} "
            f"allows fewer; the last: {why}. Give every batch the same shape (drop_last, pad), or raise the "
            "budget."
        )
        if self._is_strict:
            raise CompileBudgetError(text)
        if not self._has_warned:
            say(text)
        self._has_warned = True
