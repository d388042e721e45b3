"""The watch over a loop's input: it tells, ends the wait at its deadline, and leaves a slow loader alone."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from polyxla import StalledError
from polyxla.xla.input_watchdog import Patience

LONG_S = 30.0

Start = Callable[..., Patience]


@pytest.fixture
def given_up() -> threading.Event:
    """Set when a replica need not wait any longer."""
    return threading.Event()


@pytest.fixture
def start(given_up: threading.Event) -> Iterator[Start]:
    """Start a watch, and end it after the test."""
    started: list[Patience] = []

    def begin(timeout_s: float, line: str | None = "data.py:7") -> Patience:
        started.append(Patience(timeout_s, lambda: line, given_up.set))
        return started[-1]

    yield begin
    for one in started:
        one.close()


def test_a_wait_in_vain_is_told_and_then_ended(
    start: Start, given_up: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    patience = start(0.8)
    patience.begin()
    assert given_up.wait(LONG_S)
    assert isinstance(patience.error, StalledError)
    assert str(patience.error) == (
        "no batch arrived in 0.8 s: the loader is at data.py:7. POLYXLA_INPUT_TIMEOUT_S sets the limit."
    )
    told = r"polyxla: no batch for \d s: the loader is at data\.py:7\. After 0\.8 s it is an error \(.*\)\n"
    assert re.fullmatch(told, capsys.readouterr().err)


def test_a_loader_that_is_slow_is_left_alone(start: Start, given_up: threading.Event) -> None:
    patience = start(2.0)
    # Longer than the deadline in all, but no batch of it.
    for _ in range(30):
        patience.begin()
        time.sleep(0.1)
        patience.end()
    assert (patience.error, given_up.is_set()) == (None, False)


def test_a_step_may_take_as_long_as_it_likes(start: Start, given_up: threading.Event) -> None:
    patience = start(0.2)
    patience.begin()
    patience.end()
    assert not given_up.wait(1.0)


def test_what_hangs_in_no_line_of_the_program_is_said_to(start: Start, given_up: threading.Event) -> None:
    patience = start(0.2, line=None)
    patience.begin()
    assert given_up.wait(LONG_S)
    assert "it is at no line of the program: torch reads it, or copies it" in str(patience.error)


def test_the_watch_ends_when_it_is_closed(start: Start) -> None:
    patience = start(LONG_S)
    patience.close()
    assert "polyxla-input" not in [one.name for one in threading.enumerate()]
