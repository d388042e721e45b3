"""The limit on the number of programs that a training may compile."""

from __future__ import annotations

from polyxla import PolyxlaError, UsageError
from polyxla.plugin import say


class CompileBudgetError(PolyxlaError):
    """A training compiled more programs than its budget allows."""


class CompileBudget:
    """Counts unexpected compilations.

    Args:
        allowed: number of programs; None for no limit.
        on_budget: ``warn`` or ``raise`` when more are compiled.

    Attributes:
        spent: number of programs so far.

    Raises:
        UsageError: `on_budget` is neither, or `allowed` is negative.
    """

    def __init__(self, allowed: int | None, on_budget: str) -> None:
        if on_budget not in {"warn", "raise"}:
            raise UsageError(
                "on_budget is neither 'warn' nor 'raise'",
                where=f"on_budget={on_budget!r}",
                fix="Write on_budget='warn' or 'raise'.",
            )
        if allowed is not None and allowed < 0:
            raise UsageError(
                "compile_budget is negative",
                where=f"compile_budget={allowed}",
                fix="Write compile_budget=0 to allow no compilations.",
            )
        self.allowed = allowed
        self.spent = 0
        self._is_strict = on_budget == "raise"
        self._has_warned = False

    def spend(self, compiles: int, why: str) -> None:
        """Count compilations.

        Args:
            compiles: number of programs.
            why: the cause, for the message.

        Raises:
            CompileBudgetError: the budget is exceeded, and `on_budget` is ``raise``.
        """
        self.spent += compiles
        if self.allowed is None or self.spent <= self.allowed:
            return
        text = (
            f"{self.spent} programs were compiled after the first steps, but compile_budget={self.allowed} "
            f"allows fewer; the last: {why}. Give every batch the same shape (drop_last, pad), or raise the "
            "budget."
        )
        if self._is_strict:
            raise CompileBudgetError(text)
        if not self._has_warned:
            say(text)
        self._has_warned = True
