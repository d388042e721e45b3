"""Which traceback is shown: the first real one, once."""

from __future__ import annotations

from polyxla_pod.output.folding import EXPLAINS_S, HOLD_S, Tracebacks

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
