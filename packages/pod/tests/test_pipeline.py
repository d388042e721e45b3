"""The way of a line to a screen, with a screen that is blocked."""

from __future__ import annotations

import pytest

from polyxla_pod import pipeline
from polyxla_pod.folding import FoldedLine
from polyxla_pod.pipeline import HostState, Pipeline


class Memory:
    """A screen and a log."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.logged: list[str] = []

    def show(self, line: FoldedLine) -> None:
        self.shown.append(str(line))

    def add(self, line: FoldedLine) -> None:
        self.logged.append(str(line))

    def tick(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def output(memory: Memory) -> Pipeline:
    return Pipeline([HostState("a"), HostState("b")], memory, memory)


def test_lines_are_folded_logged_and_shown(output: Pipeline, memory: Memory) -> None:
    for host in (0, 1):
        output.add(host, "out", "step 3")
    output.tick()
    assert (memory.logged, memory.shown) == (["[w0-w1] step 3"], [])
    output.show()
    assert memory.shown == ["[w0-w1] step 3"]


def test_a_rate_that_no_json_can_hold_is_no_rate() -> None:
    progress = HostState("a").progress
    for text in ("step 1 2.5 steps/s", "step 1 inf steps/s", "step 1 nan it/s"):
        progress.read(text, 0.0)
        assert progress.steps_per_s == 2.5


def test_lines_that_a_blocked_screen_misses_are_counted(
    output: Pipeline, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "UNSHOWN_LINES", 3)
    for number in range(5):
        output.add(0, "out", str(number))
    output.flush()
    output.show()
    missed = "[w0-w1] 2 lines are not shown; the job's log has them"
    assert memory.shown == [missed, "[w0] 2", "[w0] 3", "[w0] 4"]
    assert memory.logged == [f"[w0] {number}" for number in range(5)]


def test_a_traceback_is_logged_at_once_and_shown_when_the_job_has_failed(
    output: Pipeline, memory: Memory
) -> None:
    for text in ("Traceback (most recent call last):", "ValueError: boom"):
        output.add(1, "err", text)
    output.end(1, failed=True)
    output.flush()
    output.show()
    assert (len(memory.logged), memory.shown) == (2, [])
    assert not output.is_consequence(1)
    output.flush(traceback=True)
    output.show()
    assert (
        memory.shown == memory.logged == ["[w1] Traceback (most recent call last):", "[w1] ValueError: boom"]
    )
