"""Which steps are traced, so that reads are found at little cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyxla_training.observe.slow_lines import SlowLine
from polyxla_training.observe.step_counters import (
    FIRST_STEPS,
    MAX_TRACED_STEPS,
    TraceSchedule,
)


def _train(counters: Any, fallback_op: Any, steps: int, reads: Any) -> tuple[TraceSchedule, list[SlowLine]]:
    schedule, found = TraceSchedule(counters), []
    for step in range(1, steps + 1):
        before = counters.reads
        if reads(step):
            fallback_op(torch.zeros(1))
        found += [finding for finding, _ in schedule.finish_step()]
        schedule.begin_step(counters.reads - before, is_cut=False)
    schedule.close()
    return schedule, found


@pytest.mark.parametrize("every", [1, 2, 7, 50])
def test_a_read_every_few_steps_is_found(
    counters: Any, fallback_op: Callable[[Any], Any], every: int
) -> None:
    schedule, found = _train(
        counters, fallback_op, 4 * every + 20, lambda step: step % every == 0 and step > 10
    )
    assert len(found) == 1
    assert schedule.slow_lines.steps <= MAX_TRACED_STEPS


def test_without_reads_only_the_first_steps_are_traced(
    counters: Any, fallback_op: Callable[[Any], Any]
) -> None:
    schedule, found = _train(counters, fallback_op, 100, lambda _: False)
    assert (found, schedule.slow_lines.steps) == ([], FIRST_STEPS)


def test_explained_reads_are_not_traced_again(counters: Any, fallback_op: Callable[[Any], Any]) -> None:
    schedule, found = _train(counters, fallback_op, 100, lambda _: True)
    assert (len(found), schedule.slow_lines.steps) == (1, FIRST_STEPS)
    assert schedule.slow_lines.as_json()[0]["per_traced_step"] == 1


def test_irregular_reads_are_traced_a_limited_number_of_times(
    counters: Any, fallback_op: Callable[[Any], Any]
) -> None:
    schedule, _ = _train(counters, fallback_op, 400, lambda step: step in {2**n + 5 for n in range(9)})
    assert schedule.slow_lines.steps <= MAX_TRACED_STEPS
