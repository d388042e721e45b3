"""Eight processes meet; a participant that fails the others is named to all of them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from polyxla_xrt.server.mesh import server as mesh_server

SECRET = "of one job"

BOUND_S = 20.0
"""Time limit: far below every timeout that would also end the wait, and enough for a busy machine."""

ALL = tuple(range(8))


@pytest.fixture(scope="module")
def crew(make_crew: Callable[..., Any]) -> Any:
    return make_crew(8)


def test_every_participant_gets_the_payloads_in_ordinal_order(crew: Any) -> None:
    for tag in ("a", "b", "c"):
        expected = [f"{tag}{ordinal}" for ordinal in ALL]
        for found in crew.meet_all(tag, ALL[::-1]):
            assert found == {"payloads": expected}


def test_a_tag_can_be_reused(crew: Any) -> None:
    for _ in range(50):
        for ordinal in ALL:
            crew.meet(ordinal, "again")
    for ordinal in ALL:
        for _ in range(50):
            assert crew.read(ordinal) == {"payloads": [f"again{number}" for number in ALL]}


def test_subsets_meet_at_the_same_time_under_different_tags(crew: Any) -> None:
    for ordinal in ALL:
        crew.meet(ordinal, "odd" if ordinal % 2 else "even", (1, 3, 5, 7) if ordinal % 2 else (6, 4, 2, 0))
    for ordinal in ALL:
        same = [f"{'odd' if number % 2 else 'even'}{number}" for number in ALL if number % 2 == ordinal % 2]
        assert crew.read(ordinal) == {"payloads": same}


def test_mismatching_replicas_are_reported_to_all_including_late_ones(crew: Any) -> None:
    crew.meet(0, "mismatch", (0, 1, 2))
    crew.meet(1, "mismatch", (0, 1))
    found = [crew.read(0), crew.read(1)]
    crew.meet(2, "mismatch", (0, 1, 2))
    found.append(crew.read(2))
    for outcome in found:
        assert outcome["error"] == "MismatchError"
        assert "'mismatch' failed: Mismatching replicas: (" in outcome["text"]
    assert len(crew.meet_all("mismatch", (0, 1, 2), (0, 1, 2))[0]["payloads"]) == 3


def test_the_timeout_error_names_the_tag_and_the_missing_ordinals(crew: Any) -> None:
    for ordinal in (0, 1, 2, 4, 5, 6):
        crew.meet(ordinal, "late", timeout_s=0.7 if ordinal == 2 else 30)
    for ordinal in (0, 1, 2, 4, 5, 6):
        found = crew.read(ordinal)
        assert found["error"] == "MissingError"
        assert "rendezvous 'late' failed: Ordinals missing at the deadline: 3, 7 (from" in found["text"]
        assert found["seconds"] < BOUND_S


def test_ordinal_0_may_leave_first(make_crew: Callable[..., Any]) -> None:
    crew = make_crew(3)
    crew.meet_all("last of all", (0, 1, 2))
    crew.send(0, "leave")
    time.sleep(0.3)
    assert crew.meet_all("after", (1, 2), (1, 2)) == [{"payloads": ["after1", "after2"]}] * 2
    (found,) = crew.meet_all("with 0", (1,))
    assert found["error"] == "ParticipantLostError"
    assert "Ordinal 0 has said goodbye" in found["text"]
    for ordinal in (1, 2, 0):
        if ordinal:
            crew.send(ordinal, "leave")
        assert crew.read(ordinal) == {"staying": []}
        assert crew.processes[ordinal].wait(10) == 0


def test_a_frozen_participant_is_lost(make_crew: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    hasty = [
        (name, min(value, 1000) if name.endswith("_ms") else value)
        for name, value in mesh_server._SERVER_OPTIONS
    ]
    monkeypatch.setattr(mesh_server, "_SERVER_OPTIONS", hasty)
    server = mesh_server.MeshServer("127.0.0.1:0", 2, SECRET)
    crew = make_crew(2, server.address)
    crew.processes[1].send_signal(signal.SIGSTOP)
    (found,) = crew.meet_all("frozen", (0,))
    assert found["error"] == "ParticipantLostError"
    assert found["seconds"] < BOUND_S
    crew.send(0, "leave")
    assert server.close(10) == ()


def test_a_killed_participant_is_named_to_waiting_and_late_ones(crew: Any) -> None:
    # Last, because it kills processes of the shared group.
    for ordinal in (0, 1, 2, 4, 5, 6):
        crew.meet(ordinal, "killed")
    time.sleep(0.3)
    begin = time.monotonic()
    crew.processes[3].send_signal(signal.SIGKILL)
    found = [crew.read(ordinal) for ordinal in (0, 1, 2, 4, 5, 6)]
    assert time.monotonic() - begin < BOUND_S
    found += crew.meet_all("killed", (7,)) + crew.meet_all("another", (0, 7))
    for outcome in found:
        assert outcome["error"] == "ParticipantLostError"
        assert "Ordinal 3 died or lost its connection" in outcome["text"]
    assert crew.meet_all("without", (0, 1), (0, 1)) == [{"payloads": ["without0", "without1"]}] * 2
    begin = time.monotonic()
    for ordinal in (1, 2):
        crew.meet(ordinal, "no service", (0, 1, 2))
    time.sleep(0.2)
    crew.processes[0].send_signal(signal.SIGKILL)
    for ordinal in (1, 2):
        outcome = crew.read(ordinal)
        assert outcome["error"] == "MeshServiceLostError"
        assert crew.address in outcome["text"]
    assert time.monotonic() - begin < BOUND_S
