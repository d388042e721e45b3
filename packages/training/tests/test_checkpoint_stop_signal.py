"""A stop signal: it sets a flag first, then calls the old handler."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyxla_training.checkpoint import StopSignal


@pytest.fixture(autouse=True)
def received_before() -> Iterator[list[int]]:
    """The signals that the old handlers received."""
    received_before: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, lambda number, _: received_before.append(number)) for number in numbers]
    yield received_before
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_the_first_signal_sets_the_flag_and_the_second_reaches_the_old_handler(
    received_before: list[int],
) -> None:
    with StopSignal() as stop:
        assert not stop
        signal.raise_signal(signal.SIGTERM)
        assert stop
        assert stop.received is signal.SIGTERM
        assert received_before == []
        signal.raise_signal(signal.SIGTERM)
        assert received_before == [signal.SIGTERM]
    assert stop, "the signal is still known afterwards"


def test_the_old_handlers_are_restored(received_before: list[int]) -> None:
    with StopSignal():
        signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)
    assert received_before == [signal.SIGUSR1, signal.SIGTERM]


def test_several_signals_one_flag(received_before: list[int]) -> None:
    with StopSignal(signal.SIGTERM, signal.SIGUSR1) as stop:
        received = []
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.raise_signal(number)
            received.append(stop.received)
    assert received == [signal.SIGUSR1, signal.SIGTERM]
    assert received_before == []


def test_a_handler_that_was_installed_meanwhile_stays() -> None:
    with StopSignal():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_another_thread_installs_nothing(received_before: list[int]) -> None:
    stop = StopSignal()
    installed: list[object] = []

    def enter() -> None:
        with stop:
            installed.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    thread.join(10)
    assert installed == [before]


def test_a_second_signal_ends_a_process_by_default() -> None:
    program = Path(__file__).parent / "programs" / "two_stop_signals.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "first True\n"
    assert done.returncode == -signal.SIGTERM


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with StopSignal(signal.SIGTERM, signal.SIGUSR1) as stop:
        signal.raise_signal(signal.SIGUSR1)
        assert not stop
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
