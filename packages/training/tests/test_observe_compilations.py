"""The causes of compilations, in steps and between them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyxla.plugin import location
from polyxla_training.observe import CompileBudgetError
from polyxla_training.observe.observer import AfterListeners
from polyxla_training.observe.report.run import LoggedRun
from polyxla_training.observe.report.text import as_lines


def kinds(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def test_compilations_are_explained(
    counters: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], observed_loop: Callable[..., Any]
) -> None:
    run = observed_loop(counters, tmp_path)
    for records in (32, 32, 32, 7, 32, 32):
        counters.compiles += run.replica.steps in {0, 1, 3, 5}
        run.step(records=records)
    found = kinds(run.stop(), "compile")
    assert [(event["step"], event["expected"]) for event in found] == [
        (1, True),
        (2, True),
        (4, False),
        (6, False),
    ]
    assert (
        found[2]["cause"]
        == "batch['x'] [32, 4] float32 -> [7, 4] float32, batch['y'] [32] int64 -> [7] int64"
    )
    assert found[3]["cause"] == "the same inputs: another Python path or a changed constant"
    assert all("conftest.py" in event["line"] and event["seconds"] == 0.5 for event in found)
    said = [line for line in capsys.readouterr().err.splitlines() if " compiled a program" in line]
    assert len(said) == 4
    assert ", as expected: the first step" in said[0]


def test_a_compilation_whose_time_is_unknown_has_none(
    counters: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], observed_loop: Callable[..., Any]
) -> None:
    counters.seconds_each = 0.0
    run = observed_loop(counters, tmp_path)
    counters.compiles += 1
    run.step(records=32)
    events = run.stop()
    said = capsys.readouterr().err
    assert "step 1 compiled a program, as expected: the first step" in said
    report = "\n".join(as_lines(LoggedRun.of(str(tmp_path), events)))
    assert re.search(r"programs compiled +1, 0 unexpected", report)
    assert "step 1: 1, the first step" in report


def test_a_compilation_in_the_second_step_is_unexpected_if_its_inputs_changed(
    counters: Any, tmp_path: Path, observed_loop: Callable[..., Any]
) -> None:
    run = observed_loop(counters, tmp_path)
    for records in (32, 7):
        counters.compiles += 1
        run.step(records=records)
    assert [event["expected"] for event in kinds(run.stop(), "compile")] == [True, False]


def test_the_number_of_pieces_of_a_cut_step_is_reported(
    counters: Any, tmp_path: Path, observed_loop: Callable[..., Any]
) -> None:
    run = observed_loop(counters, tmp_path)
    for pieces in (1, 1, 1, 3):
        counters.executions += pieces
        counters.compiles += pieces > 1
        run.step()
    [found] = kinds(run.stop(), "compile")
    assert found["cause"].endswith("; the step ran in 3 pieces, not 1")


def test_replicas_of_one_process_are_counted_together(
    counters: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], observed_loop: Callable[..., Any]
) -> None:
    run = observed_loop(counters, tmp_path, shared=True)
    for _ in range(3):
        counters.compiles += 1
        run.step()
    events = run.stop()
    assert "or another replica of this process" in kinds(events, "compile")[-1]["cause"]
    assert events[-1]["summary"]["is_shared"]
    assert "counted over all replicas of this process" in capsys.readouterr().err


def test_compilations_of_evaluations_are_explained_separately(
    counters: Any, tmp_path: Path, observed_loop: Callable[..., Any]
) -> None:
    run = observed_loop(counters, tmp_path, compile_budget=0)
    run.step()
    for records in (50, 50, 9):
        counters.compiles += 1
        run.evaluation(records)
        run.step()
    found = kinds(run.stop(), "compile")
    assert [event["cause"].partition(",")[0] for event in found] == ["the first evaluation"] + [
        "in an evaluation"
    ] * 2
    assert "the same inputs" in found[1]["cause"]
    assert "[50, 4] float32 -> [9, 4] float32" in found[2]["cause"]
    assert [event["expected"] for event in found] == [True, False, False]


def test_metrics_without_an_evaluation_are_those_of_the_steps(
    counters: Any, tmp_path: Path, observed_loop: Callable[..., Any]
) -> None:
    run = observed_loop(counters, tmp_path)
    run.step()
    counters.compiles += 1
    run.observer.polyxla_metrics_ready(step=1, metrics={"loss": 1.0})
    assert kinds(run.stop(), "compile")[0]["cause"] == "an exchange of metrics or of a checkpoint"


def test_what_the_end_of_an_epoch_compiles_is_not_the_next_steps(
    counters: Any, tmp_path: Path, observed_loop: Callable[..., Any]
) -> None:
    # Replicas exchange their metrics even if there are none, and that may compile a program.
    run = observed_loop(counters, tmp_path)
    for _ in range(3):
        counters.compiles += run.replica.steps < 2
        run.step()
        counters.compiles += run.replica.steps < 2
        run.step()
        counters.compiles += run.replica.steps == 2
        run.observer.polyxla_epoch_finished()
    found = kinds(run.stop(), "compile")
    assert [(event["step"], event["expected"]) for event in found] == [(1, True), (2, True), (2, True)]
    assert found[-1]["cause"] == "an exchange of metrics or of a checkpoint"


def test_what_the_end_of_an_epoch_compiles_is_not_the_evaluations(
    counters: Any, tmp_path: Path, observed_loop: Callable[..., Any]
) -> None:
    run = observed_loop(counters, tmp_path, compile_budget=0)
    run.step()
    run.evaluation(50)
    counters.compiles += 1
    run.observer.polyxla_epoch_finished()
    [found] = kinds(run.stop(), "compile")
    assert (found["cause"], found["expected"]) == ("an exchange of metrics or of a checkpoint", True)


def test_what_other_listeners_compile_is_not_the_next_steps(
    counters: Any, tmp_path: Path, observed_loop: Callable[..., Any]
) -> None:
    run = observed_loop(counters, tmp_path)
    after = AfterListeners(run.observer)
    for step in range(1, 6):
        run.step()
        counters.compiles += step == 3
        after.polyxla_step_finished()
    [found] = kinds(run.stop(), "compile")
    assert (found["step"], found["expected"]) == (3, True)


def test_over_budget_the_run_ends_and_its_log_has_the_cause(
    counters: Any, tmp_path: Path, observed_loop: Callable[..., Any]
) -> None:
    run = observed_loop(counters, tmp_path, compile_budget=1, on_budget="raise")
    for _ in range(3):
        counters.compiles += 1
        run.step()
    counters.compiles += 1
    with pytest.raises(CompileBudgetError) as raised:
        run.step()
    events = run.stop(raised.value)
    assert len(kinds(events, "compile")) == 4
    assert events[-1]["error"].startswith("CompileBudgetError: 2 programs")


class Trained:
    def training_step(self, batch: Any) -> None: ...


@pytest.mark.parametrize("module", [Trained(), object()], ids=["with-training-step", "without"])
def test_a_trainers_compilation_has_the_line_of_its_training_step(
    counters: Any, observed_loop: Callable[..., Any], tmp_path: Path, module: object
) -> None:
    # Never the line that is innermost in the stack: in a Trainer that is the user's call of fit.
    run = observed_loop(counters, tmp_path, module=module)
    counters.compiles += 1
    run.step()
    [found] = kinds(run.stop(), "compile")
    expected = location(Trained.training_step.__code__) if isinstance(module, Trained) else None
    assert found["line"] == expected
