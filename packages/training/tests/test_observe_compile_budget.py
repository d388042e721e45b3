"""The limit on compilations: it warns once, or raises."""

from __future__ import annotations

import pytest

from polyxla import UsageError
from polyxla_training.observe import CompileBudgetError
from polyxla_training.observe.compilations import CompileBudget


def test_a_budget_is_spent_before_it_warns_and_warns_once(capsys: pytest.CaptureFixture[str]) -> None:
    budget = CompileBudget(2, "warn")
    for number in range(5):
        budget.spend(1, f"reason {number}")
    assert budget.spent == 5
    [line] = capsys.readouterr().err.splitlines()
    assert "3 programs" in line
    assert "compile_budget=2" in line
    assert "reason 2" in line


def test_a_strict_budget_raises() -> None:
    budget = CompileBudget(1, "raise")
    budget.spend(1, "a reason")
    with pytest.raises(CompileBudgetError, match="another reason"):
        budget.spend(1, "another reason")


def test_without_a_budget_any_number_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    CompileBudget(None, "raise").spend(1000, "a reason")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("allowed", "then"), [(-1, "warn"), (1, "panic")])
def test_an_invalid_budget_is_refused(allowed: int, then: str) -> None:
    with pytest.raises(UsageError):
        CompileBudget(allowed, then)
