"""What is said of replicas that wait for others that have returned."""

from __future__ import annotations

import threading

import pytest

from polyxla.plugin import presence
from polyxla.presence import Position, count_steps, named, running, unequal


def at(ordinal: int, steps: int | None, line: str | None = "train.py:7") -> Position:
    return Position(ordinal, steps, line=line)


def returned(ordinal: int, steps: int | None = 3) -> Position:
    return Position(ordinal, steps, has_returned=True)


@pytest.mark.parametrize(
    ("positions", "waiting", "text"),
    [
        pytest.param([at(0, 3), at(1, 3)], {1}, None, id="nobody-has-returned"),
        pytest.param(
            [at(1, 3), returned(0)],
            {1},
            "replica 0 returned after 3 steps; replica 1 waits in step 4 at train.py:7",
            id="one-waits",
        ),
        pytest.param(
            [returned(0, 1), at(1, 9, None)],
            {1},
            "replica 0 returned after 1 step; replica 1 waits in step 2, at the end of its function",
            id="submitted-all-its-steps",
        ),
        pytest.param(
            [returned(0, None), at(1, None)],
            {1},
            "replica 0 returned; replica 1 waits at train.py:7",
            id="steps-are-not-counted",
        ),
        pytest.param(
            [at(0, 3), returned(1), at(2, 3), at(3, 2, "eval.py:3"), returned(4), at(5, 3)],
            {0, 2, 5},
            "replicas 1, 4 returned after 3 steps; replicas 0, 2, 5 wait in step 4 at train.py:7; "
            "replica 3 is in step 3 at eval.py:3",
            id="several",
        ),
    ],
)
def test_replicas_that_returned_come_first_and_equal_accounts_together(
    positions: list[Position], waiting: set[int], text: str | None
) -> None:
    assert unequal(positions, waiting) == text


def test_a_run_of_ordinals_is_abbreviated() -> None:
    assert named([3]) == "replica 3"
    assert named([1, 0]) == "replicas 0, 1"
    assert named(range(8)) == "replicas 0-7"
    assert named([0, 1, 2, 4]) == "replicas 0, 1, 2, 4"


@pytest.fixture(autouse=True)
def _forget() -> None:
    presence.forget()


def test_listeners_get_the_start_and_the_return_but_no_return_after_an_exception() -> None:
    seen: list[Position] = []
    presence.listen(seen.append)
    with running(2):
        count_steps(2, lambda: 7)
        (here,) = presence.positions()
    assert (here.ordinal, here.steps, here.has_returned) == (2, 7, False)
    assert seen == [Position(2), Position(2, 7, has_returned=True)]
    with pytest.raises(ValueError, match="on purpose"), running(2):
        raise ValueError("on purpose")
    assert len(seen) == 3


def test_a_replicas_line_is_that_of_its_own_thread() -> None:
    inside, leave = threading.Event(), threading.Event()

    def train() -> None:
        with running(1):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=train)
    thread.start()
    inside.wait(30)
    (position,) = presence.positions()
    leave.set()
    thread.join()
    assert position.line is not None
    assert position.line.endswith(f"test_presence.py:{train.__code__.co_firstlineno + 3}")
