"""The state of the mesh service, without processes, ports or a clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyxla_xrt.protocol.mesh import format_ordinals
from polyxla_xrt.server.mesh.rendezvous import Arrival, FailureKind, Mesh, MeshFailure, Outcome


class Table:
    """A mesh that all participants attend, and the outcomes that each got, in order."""

    def __init__(self, world_size: int) -> None:
        self.mesh = Mesh(world_size)
        self.answers: dict[int, list[Outcome]] = {}
        for ordinal in range(world_size):
            assert self.mesh.attend(ordinal, world_size) is None

    def arrive(
        self, ordinal: int, replicas: tuple[int, ...] = (), tag: str = "tag", deadline: float = 10
    ) -> Arrival:
        answers = self.answers.setdefault(ordinal, [])
        arrival = Arrival(tag, ordinal, f"{tag}{ordinal}".encode(), replicas, deadline, answers.append)
        self.mesh.arrive(arrival)
        return arrival

    def text(self, ordinal: int) -> str:
        answer = self.answers[ordinal][-1]
        assert isinstance(answer, MeshFailure)
        return answer.text


@given(st.permutations(range(5)))
def test_the_last_arrival_answers_all_in_ordinal_order(order: list[int]) -> None:
    table = Table(5)
    for ordinal in order:
        assert not any(table.answers.values())
        table.arrive(ordinal)
    expected = [tuple(f"tag{ordinal}".encode() for ordinal in range(5))]
    assert table.answers == dict.fromkeys(range(5), expected)
    assert not table.mesh._rendezvous


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ([(0, (0, 1, 2)), (1, (0, 1))], "Mismatching replicas: (0-2) vs. (0-1) of 1"),
        ([(0, ()), (1, (0, 1))], "Mismatching replicas: (0-3) vs. (0-1) of 1"),
        ([(0, ()), (0, ())], "Duplicate ordinal: 0 already waits here"),
        ([(0, ()), (4, ())], "Invalid ordinal: 4, of 4 replicas"),
        ([(0, ()), (1, (1, 9))], "Invalid ordinal: 9, of 4 replicas"),
        ([(0, (0, 1)), (3, (0, 1))], "Invalid ordinal: 3 is not one of its replicas (0-1)"),
        ([(0, ()), (1, (1, 1))], "Duplicate ordinal: 1, in the replicas of ordinal 1"),
    ],
)
def test_a_contradiction_is_reported_to_every_participant(
    calls: list[tuple[int, tuple[int, ...]]], text: str
) -> None:
    table = Table(4)
    for ordinal, replicas in calls:
        table.arrive(ordinal, replicas)
    failure = MeshFailure(FailureKind.DISAGREEMENT, text)
    assert all(answer == failure for answers in table.answers.values() for answer in answers)
    assert sum(len(answers) for answers in table.answers.values()) == len(calls)
    for late in {0, 1, 2, 3} & set(calls[0][1] or range(4)) - {ordinal for ordinal, _ in calls}:
        table.arrive(late, calls[0][1])
        assert table.answers[late] == [failure]
    assert not table.mesh._rendezvous
    assert not table.mesh._failed


def test_the_earliest_deadline_of_a_tag_ends_it_for_all() -> None:
    table = Table(4)
    table.arrive(0, deadline=10)
    table.arrive(1, deadline=5)
    table.arrive(0, (0, 1), tag="other", deadline=20)
    table.mesh.expire(4.9)
    assert not any(table.answers.values())
    table.mesh.expire(5)
    failure = MeshFailure(FailureKind.MISSING, "Ordinals missing at the deadline: 2-3")
    assert table.answers == {0: [failure], 1: [failure]}
    table.arrive(2)
    assert table.answers[2] == [failure]


def test_the_timeout_names_participants_that_never_connected() -> None:
    mesh, answers = Mesh(3), list[Outcome]()
    mesh.attend(0, 3)
    mesh.attend(1, 3)
    mesh.arrive(Arrival("tag", 0, b"", (), 1, answers.append))
    mesh.expire(1)
    text = "Ordinals missing at the deadline: 1-2 (of these never connected: 2)"
    assert answers == [MeshFailure(FailureKind.MISSING, text)]


@pytest.mark.parametrize(
    ("how", "says"), [("lose", "died or lost its connection"), ("leave", "has said goodbye")]
)
def test_a_gone_participant_fails_waiting_and_later_rendezvous(how: str, says: str) -> None:
    table = Table(3)
    table.arrive(0)
    table.arrive(1, (0, 1), tag="without")
    getattr(table.mesh, how)(2)
    assert table.answers[0] == [MeshFailure(FailureKind.GONE, f"Ordinal 2 {says}")]
    table.arrive(1)
    assert table.text(1) == f"Ordinal 2 {says}"
    table.arrive(0, (0, 1), tag="without")
    assert table.answers[0][-1] == (b"without0", b"without1")


def test_a_goodbye_is_not_a_death_and_the_dead_cannot_return() -> None:
    table = Table(3)
    table.mesh.leave(0)
    table.mesh.lose(0)
    table.mesh.lose(1)
    table.arrive(2)
    assert table.text(2) == "Ordinal 1 died or lost its connection; ordinal 0 has said goodbye"
    assert table.mesh.staying == (2,)
    refused = table.mesh.attend(1, 3)
    assert refused
    assert refused.text == "Ordinal 1 died or lost its connection, and cannot come back"


@pytest.mark.parametrize(
    ("ordinal", "world_size", "text"),
    [
        (0, 2, "Duplicate ordinal: 0 already attends"),
        (2, 2, "Invalid ordinal: 2, of 2 replicas"),
        (1, 3, "Ordinal 1 expects 3 replicas, the mesh service 2"),
    ],
)
def test_a_refused_participant_gets_the_reason(ordinal: int, world_size: int, text: str) -> None:
    mesh = Mesh(2)
    assert mesh.attend(0, 2) is None
    assert mesh.attend(ordinal, world_size) == MeshFailure(FailureKind.REFUSED, text)


def test_a_rendezvous_needs_attendance() -> None:
    mesh, answers = Mesh(2), list[Outcome]()
    mesh.arrive(Arrival("tag", 1, b"", (), 1, answers.append))
    assert answers == [MeshFailure(FailureKind.REFUSED, "Ordinal 1 has not attended")]


def test_a_withdrawn_call_leaves_no_trace() -> None:
    table = Table(2)
    table.mesh.withdraw(table.arrive(0))
    assert not table.mesh._rendezvous
    table.arrive(1)
    table.arrive(0)
    assert table.answers == {0: [(b"tag0", b"tag1")], 1: [(b"tag0", b"tag1")]}


ACTIONS = st.one_of(
    st.tuples(
        st.just("arrive"),
        st.integers(0, 4),
        st.sampled_from(["a", "b"]),
        st.sampled_from([(), (0, 1), (1, 0), (1, 2, 3), (0, 9)]),
    ),
    st.tuples(st.sampled_from(["lose", "leave", "expire"]), st.integers(0, 4)),
)


@given(st.lists(ACTIONS, max_size=60))
def test_every_call_is_answered_once_and_no_state_remains(actions: list[tuple[object, ...]]) -> None:
    mesh, calls = Mesh(4), list[list[Outcome]]()
    for ordinal in range(4):
        mesh.attend(ordinal, 4)
    for now, (name, who, *rest) in enumerate(actions):
        if name == "arrive":
            calls.append([])
            tag, replicas = rest
            assert isinstance(who, int)
            assert isinstance(tag, str)
            assert isinstance(replicas, tuple)
            mesh.arrive(Arrival(tag, who, b"", replicas, now + 20, calls[-1].append))
        else:
            getattr(mesh, str(name))(now if name == "expire" else who)
    mesh.expire(1e9)
    assert [len(call) for call in calls] == [1] * len(calls)
    for ordinal in range(4):
        mesh.lose(ordinal)
    assert not mesh._failed
    assert not mesh._rendezvous
    assert not mesh.staying


@pytest.mark.parametrize(
    ("ordinals", "text"),
    [
        ((), ""),
        ((3,), "3"),
        ((0, 1, 2, 5), "0-2, 5"),
        (tuple(range(0, 60, 2)), ", ".join(str(ordinal) for ordinal in range(0, 40, 2)) + ", and 10 more"),
    ],
)
def test_ordinals_are_formatted_as_ranges(ordinals: tuple[int, ...], text: str) -> None:
    assert format_ordinals(ordinals) == text
