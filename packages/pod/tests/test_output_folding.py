"""Folding lines of several hosts: pure, with a clock that the test holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyxla_pod.output.folding import WINDOW_S, Folder, host_range


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
