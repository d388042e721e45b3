"""The input watchdog: it warns, ends a wait at its deadline, and leaves a slow loader alone."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from polyxla import StalledError
from polyxla.plugin import env
from polyxla.xla import input_watchdog
from polyxla.xla.input_watchdog import InputWatchdog

LONG_S = 30.0

Start = Callable[..., InputWatchdog]


@pytest.fixture
def cancelled() -> threading.Event:
    """Set when the watchdog cancels the wait."""
    return threading.Event()


@pytest.fixture
def start(cancelled: threading.Event) -> Iterator[Start]:
    """Start a watchdog, and end it after the test."""
    started: list[InputWatchdog] = []

    def begin(timeout_s: float, line: str | None = "data.py:7") -> InputWatchdog:
        started.append(InputWatchdog(timeout_s, lambda: line, cancelled.set))
        return started[-1]

    yield begin
    for watchdog in started:
        watchdog.close()


class _Clock:
    """A clock that a test sets, and that knows how often it was read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads = 0

    def monotonic(self) -> float:
        self.reads += 1
        return self.now

    def advance(self, now: float) -> None:
        """Change the time, and let the watchdog look at it."""
        self.now, before, deadline = now, self.reads, time.monotonic() + LONG_S
        # It has printed what there is to say of one look before the next.
        while self.reads < before + 3:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(input_watchdog, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(input_watchdog, "TICK_S", 0.001)
    return clock


def test_a_stalled_wait_is_reported_and_then_ended(
    start: Start, cancelled: threading.Event, clock: _Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    watchdog = start(0.8)
    watchdog.begin()
    clock.advance(0.5)
    line = r"polyxla: no batch for \d s: the loader is at data\.py:7\. After 0\.8 s this is an error \(.*\)\n"
    assert re.fullmatch(line, capsys.readouterr().err)
    assert not cancelled.is_set()
    clock.now = 0.9
    assert cancelled.wait(LONG_S)
    assert isinstance(watchdog.error, StalledError)
    assert str(watchdog.error) == (
        "no batch arrived in 0.8 s: the loader is at data.py:7. POLYXLA_INPUT_TIMEOUT_S sets the limit."
    )


def test_by_default_a_wait_is_reported_after_a_minute_and_is_an_error_after_half_an_hour(
    start: Start, cancelled: threading.Event, clock: _Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    watchdog = start(env.timeout_s({}, env.POLYXLA_INPUT_TIMEOUT_S))
    watchdog.begin()
    clock.advance(59.0)
    assert capsys.readouterr().err == ""
    clock.advance(61.0)
    line = "polyxla: no batch for 61 s: the loader is at data.py:7. After 1800 s this is an error"
    assert capsys.readouterr().err.startswith(line)
    clock.advance(1799.0)
    assert (capsys.readouterr().err, cancelled.is_set()) == ("", False)
    clock.now = 1801.0
    assert cancelled.wait(LONG_S)
    assert "no batch arrived in 1800 s" in str(watchdog.error)


def test_a_slow_loader_is_not_interrupted(start: Start, cancelled: threading.Event) -> None:
    watchdog = start(2.0)
    # Longer than the deadline altogether, but not for one batch.
    for _ in range(30):
        watchdog.begin()
        time.sleep(0.1)
        watchdog.end()
    assert (watchdog.error, cancelled.is_set()) == (None, False)


def test_a_long_step_does_not_count_as_a_wait(start: Start, cancelled: threading.Event) -> None:
    watchdog = start(0.2)
    watchdog.begin()
    watchdog.end()
    assert not cancelled.wait(1.0)


def test_a_hang_outside_the_program_is_reported_as_such(start: Start, cancelled: threading.Event) -> None:
    watchdog = start(0.2, line=None)
    watchdog.begin()
    assert cancelled.wait(LONG_S)
    assert "no line of the program is running: torch reads the batch, or copies it" in str(watchdog.error)


def test_the_watchdog_ends_when_it_is_closed(start: Start) -> None:
    watchdog = start(LONG_S)
    watchdog.close()
    assert "polyxla-input" not in [thread.name for thread in threading.enumerate()]
