"""The stall watchdog, in real processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polyxla_bridge import env

Outcomes = Callable[..., list[tuple[int, list[str], str]]]


def timeout(seconds: int) -> dict[str, str]:
    return {env.POLYXLA_STALL_TIMEOUT_S: str(seconds)}


@pytest.fixture(params=["jaxlib", "plugin"])
def environ(request: pytest.FixtureRequest, on_plugin: Callable[[int], dict[str, str]]) -> dict[str, str]:
    """Variables of an engine with two replicas in one process."""
    return on_plugin(2) if request.param == "plugin" else {}


@pytest.mark.slow
def test_a_stuck_replica_ends_the_process_with_a_report(outcomes: Outcomes, environ: dict[str, str]) -> None:
    environ |= timeout(2)
    ((code, _, err),) = outcomes("stalls.py", "replica_hangs", replicas=2, processes=1, **environ)
    assert code == 5, err
    text = "the other replicas do not join its collectives (replica 0: in sum_of_all with all-reduce"
    assert text in err
    assert "replica 1: idle for" in err
    assert "the_place_where_replica_1_hangs" in err
    assert "POLYXLA_STALL_TIMEOUT_S=2 " in err


@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_wait_for_a_replica_that_has_returned_ends_soon(outcomes: Outcomes, processes: int) -> None:
    found = outcomes("stalls.py", "replica_returns", replicas=2, processes=processes, **timeout(300))
    code, (seconds,), err = found[0]
    assert code == 5, err
    assert "it waits for one that has returned (replica 0: in sum_of_all with all-reduce for" in err
    assert "; returned: 1)" in err
    assert float(seconds) < 12


@pytest.mark.slow
@pytest.mark.parametrize("shares", ["on", "off"])
def test_the_error_of_a_sum_does_not_overtake_the_report(outcomes: Outcomes, shares: str) -> None:
    environ = timeout(300) | {env.POLYXLA_SHARED_MEMORY: shares}
    program = "process_of_a_returned_replica_ends"
    (code, lines, err), _ = outcomes("stalls.py", program, replicas=2, processes=2, **environ)
    assert (code, lines) == (5, []), err
    assert "it waits for one that has returned (replica 0: in sum_of_all with all-reduce for" in err
    assert "; returned: 1)" in err


@pytest.mark.long
@pytest.mark.parametrize("reason", ["computes on", "is not in the group"])
def test_a_replica_whose_others_have_returned_may_work_on(outcomes: Outcomes, reason: str) -> None:
    replicas = 2 if reason == "computes on" else 3
    found = outcomes("stalls.py", "others_return", reason, replicas=replicas, processes=1, **timeout(300))
    assert [(code, lines) for code, lines, _ in found] == [(0, ["done"])], found[0][2]


@pytest.mark.slow
def test_a_replica_of_a_plugin_that_has_returned_ends_a_wait_for_it(
    outcomes: Outcomes, on_plugin: Callable[[int], dict[str, str]]
) -> None:
    environ = on_plugin(2) | timeout(300)
    ((code, _, err),) = outcomes("stalls.py", "replica_returns", replicas=2, processes=1, **environ)
    assert code == 5, err
    assert "; returned: 1)" in err


@pytest.mark.slow
def test_a_handler_is_called_once_instead(outcomes: Outcomes, environ: dict[str, str]) -> None:
    environ |= timeout(2)
    ((code, lines, err),) = outcomes("stalls.py", "handler_is_called", replicas=2, processes=1, **environ)
    assert code == 0, err
    assert lines == ["1 [2.0, 2.0]"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("reason", ["compiles", "computes", "computes often"])
def test_a_replica_that_compiles_or_computes_may_keep_others_waiting(
    outcomes: Outcomes, processes: int, reason: str
) -> None:
    found = outcomes("stalls.py", "replica_is_busy", reason, replicas=2, processes=processes, **timeout(3))
    assert [code for code, _, _ in found] == [0] * processes, [err for _, _, err in found]
    expected = [["{0: 2.0}"], ["{1: 2.0}"]] if processes == 2 else [["{0: 2.0, 1: 2.0}"]]
    assert [lines for _, lines, _ in found] == expected


@pytest.mark.slow
def test_a_process_that_hangs_is_a_stall(outcomes: Outcomes) -> None:
    waits, hangs = outcomes("stalls.py", "process_hangs", replicas=2, processes=2, **timeout(2))
    assert waits[0] == 5, waits[2]
    assert "replica 0: in sum_of_all with all-reduce" in waits[2]
    assert hangs == (0, ["process 0 has ended"], "")
