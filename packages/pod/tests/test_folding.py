"""Folding lines of several hosts, and choosing a traceback: pure, with a clock that the test holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyxla_pod.folding import EXPLAINS_S, HOLD_S, WINDOW_S, Folder, Tracebacks, host_range


def test_a_line_of_all_hosts_is_one_line_at_once() -> None:
    folder = Folder(3)
    for host in (1, 0):
        folder.add(host, "out", "hello", 0.0)
    assert folder.take(0.0) == []
    folder.add(2, "out", "hello", 0.1)
    assert [str(line) for line in folder.take(0.1)] == ["[w0-w2] hello"]
    assert folder.take(100.0) == []


def test_a_line_of_some_hosts_waits_for_the_others_only_so_long() -> None:
    folder = Folder(3)
    folder.add(0, "out", "hello", 0.0)
    folder.add(2, "out", "hello", 0.1)
    assert folder.take(WINDOW_S - 0.01) == []
    assert [str(line) for line in folder.take(WINDOW_S)] == ["[w0,w2] hello"]


def test_lines_of_different_streams_or_texts_are_not_folded() -> None:
    folder = Folder(2)
    folder.add(0, "out", "hello", 0.0)
    folder.add(1, "err", "hello", 0.0)
    folder.add(1, "out", "hello ", 0.0)
    assert len(folder.take(WINDOW_S)) == 3


def test_a_repeated_line_stays_as_often_as_each_host_printed_it() -> None:
    folder = Folder(2)
    for _ in range(3):
        folder.add(0, "out", "again", 0.0)
    for _ in range(2):
        folder.add(1, "out", "again", 0.0)
    found = [str(line) for line in folder.take(0.0, everything=True)]
    assert found == ["[w0-w1] again", "[w0-w1] again", "[w0] again"]


LINES = st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.floats(0, 0.3)), max_size=60)


@given(LINES)
def test_each_hosts_lines_stay_complete_and_in_order(lines: list[tuple[int, str, float]]) -> None:
    folder, now, taken = Folder(4), 0.0, []
    for host, text, pause in lines:
        now += pause
        folder.add(host, "out", text, now)
        taken += folder.take(now)
    taken += folder.take(now, everything=True)
    for host in range(4):
        printed = [text for number, text, _ in lines if number == host]
        assert [line.text for line in taken if host in line.hosts] == printed
    assert all(len(set(line.hosts)) == len(line.hosts) for line in taken)


@pytest.mark.parametrize(
    ("hosts", "text"),
    [([3], "w3"), ([0, 1], "w0-w1"), ([2, 0, 1, 5, 7, 6], "w0-w2,w5-w7"), (range(1024), "w0-w1023")],
)
def test_host_numbers_are_written_as_ranges(hosts: list[int], text: str) -> None:
    assert host_range(hosts) == text


BEGIN = "Traceback (most recent call last):"


def traceback(error: str, line: int = 1) -> list[str]:
    return [BEGIN, f'  File "train.py", line {line}, in <module>', error, "raised in replica 1 on host"]


def failed(tracebacks: Tracebacks, host: int, lines: list[str]) -> None:
    for text in lines:
        assert tracebacks.holds(host, "err", text, 0.0)
    assert tracebacks.end(host, 0.0, failed=True) is None


def test_other_lines_are_not_held() -> None:
    tracebacks = Tracebacks()
    assert not tracebacks.holds(0, "err", "a warning", 0.0)
    assert not tracebacks.holds(0, "out", BEGIN, 0.0)
    assert tracebacks.holds(0, "err", BEGIN, 0.0)
    assert not tracebacks.holds(1, "err", "a warning", 0.0)


def test_the_first_traceback_wins() -> None:
    tracebacks = Tracebacks()
    failed(tracebacks, 2, traceback("ValueError: boom"))
    failed(tracebacks, 0, traceback("KeyError: 'x'"))
    first = tracebacks.first()
    assert first is not None
    assert (first[0].error, first[1]) == ("ValueError: boom", [2])


def test_a_consequence_does_not_win_over_a_later_cause() -> None:
    tracebacks = Tracebacks()
    failed(tracebacks, 0, traceback("polyxla.errors.ReplicaLostError: host 1 failed"))
    assert tracebacks.is_consequence(0)
    failed(tracebacks, 1, traceback("ValueError: boom"))
    assert not tracebacks.is_consequence(1)
    first = tracebacks.first()
    assert first is not None
    assert first[1] == [1]


def test_hosts_with_the_same_traceback_are_named_together() -> None:
    tracebacks = Tracebacks()
    failed(tracebacks, 0, traceback("ValueError: boom"))
    failed(tracebacks, 1, traceback("ValueError: boom"))
    failed(tracebacks, 2, traceback("ValueError: boom", line=9))
    first = tracebacks.first()
    assert first is not None
    assert first[1] == [0, 1]


def test_a_host_that_goes_on_shows_its_traceback_after_a_while() -> None:
    tracebacks = Tracebacks()
    for text in traceback("ValueError: handled"):
        assert tracebacks.holds(0, "err", text, 1.0)
    assert tracebacks.release(1.0 + HOLD_S - 0.01) == []
    (released,) = tracebacks.release(1.0 + HOLD_S)
    assert len(released.lines) == 4
    assert not tracebacks.holds(0, "err", "and on", 9.0)


def test_a_host_that_prints_all_the_time_shows_its_traceback_too() -> None:
    tracebacks = Tracebacks()
    assert tracebacks.holds(0, "err", BEGIN, 0.0)
    assert tracebacks.holds(0, "err", "step 1", HOLD_S - 0.1)
    (released,) = tracebacks.release(HOLD_S)
    assert released.lines == [BEGIN, "step 1"]
    assert not tracebacks.holds(0, "err", "step 2", HOLD_S)


def test_a_traceback_that_was_shown_is_not_shown_again_and_still_explains_the_failure() -> None:
    tracebacks = Tracebacks()
    for text in traceback("ValueError: slow to end"):
        assert tracebacks.holds(0, "err", text, 0.0)
    tracebacks.release(HOLD_S)
    assert tracebacks.end(0, HOLD_S + 2, failed=True) is None
    failed(tracebacks, 1, traceback("ReplicaLostError: host 0 failed"))
    assert not tracebacks.is_consequence(0)
    assert tracebacks.first() is None


def test_an_old_traceback_explains_nothing() -> None:
    tracebacks = Tracebacks()
    assert tracebacks.holds(0, "err", BEGIN, 0.0)
    tracebacks.release(HOLD_S)
    tracebacks.end(0, HOLD_S + EXPLAINS_S, failed=True)
    failed(tracebacks, 1, traceback("ValueError: boom"))
    first = tracebacks.first()
    assert first is not None
    assert first[1] == [1]


def test_a_host_that_ends_well_shows_its_traceback() -> None:
    tracebacks = Tracebacks()
    assert tracebacks.holds(0, "err", BEGIN, 0.0)
    held = tracebacks.end(0, 0.0, failed=False)
    assert held is not None
    assert tracebacks.first() is None
