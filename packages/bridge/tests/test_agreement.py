"""Replicas compare their collectives before they meet."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import agreement
from polyxla_bridge.programs.agreement import Agreement
from polyxla_bridge.programs.executable import Executable
from polyxla_bridge.sealing import sealed, unsealed

KEY, SECRET = "polyxla/board", "of the job"
SUM, MAX = "all-reduce (add) of float32[2]", "all-reduce (maximum) of float32[2]"


class _Store:
    """The job's key-value store."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        self._values[key] = value

    def blocking_key_value_get_bytes(self, key: str, timeout_ms: int) -> bytes:
        return self._values[key]


def _program(*meets: Any) -> Executable:
    whole = tuple((meet, ()) if isinstance(meet, str) else meet for meet in meets)
    return Executable("step", (), 4, b"", 0, "", meets=whole)


@pytest.fixture(params=["threads", "processes"])
def replicas(request: pytest.FixtureRequest) -> Iterator[list[Agreement]]:
    """The agreement that each of four replicas uses."""
    if request.param == "threads":
        yield [Agreement(None, BridgeSettings(replicas=4))] * 4
        return
    store = _Store()
    yield [
        Agreement(store, BridgeSettings(secret=SECRET, replicas=4, processes=4, process=n)) for n in range(4)
    ]


def test_replicas_that_agree_continue_in_programs_of_different_lengths(replicas: list[Agreement]) -> None:
    together, first, second = _program(SUM, MAX), _program(SUM), _program(MAX)
    # More than the ring holds.
    for _ in range(agreement.RING):
        for replica, own in enumerate(replicas):
            for program in (first, second) if replica % 2 else (together,):
                own.meet(program, replica)


def test_the_replica_that_comes_second_sees_the_difference(replicas: list[Agreement]) -> None:
    for replica in (0, 2):
        replicas[replica].meet(_program(SUM, SUM), replica)
    replicas[3].meet(_program(SUM), 3)
    expected = f"replicas disagree: in the same turn, replica 0 calls {SUM} and replica 3 {MAX}. All"
    with pytest.raises(PjrtError) as caught:
        replicas[3].meet(_program(MAX), 3)
    assert caught.value.message.startswith(expected)


def test_programs_that_agreed_before_are_compared_each_time(replicas: list[Agreement]) -> None:
    add, maximum = _program(SUM), _program(MAX)
    for program in (add, maximum):
        for replica in range(4):
            replicas[replica].meet(program, replica)
    replicas[1].meet(add, 1)
    with pytest.raises(PjrtError, match=r"replica 0 calls .*maximum.* and replica 1 .*add"):
        replicas[0].meet(maximum, 0)


def test_replicas_of_different_groups_are_not_compared(replicas: list[Agreement]) -> None:
    groups = ((0, 1), (2, 3))
    for replica in range(4):
        replicas[replica].meet(_program((SUM if replica < 2 else MAX, groups)), replica)
    replicas[2].meet(_program((SUM, groups)), 2)
    with pytest.raises(PjrtError, match=r"replica 2 calls .*add.* and replica 3 .*maximum"):
        replicas[3].meet(_program((MAX, groups)), 3)


def test_replicas_that_wait_for_each_other_in_different_groups_are_an_error(
    replicas: list[Agreement],
) -> None:
    rows, columns = _program((SUM, ((0, 1), (2, 3)))), _program((SUM, ((0, 2), (1, 3))))
    # Replicas 0 and 1 have met, and so have 2 and 3.
    for replica in range(4):
        replicas[replica].meet(rows, replica)
    replicas[0].meet(rows, 0)
    replicas[1].meet(columns, 1)
    replicas[2].meet(columns, 2)
    expected = (
        rf"replica 3 waits for replica 2 in {re.escape(SUM)} among replicas 2, 3; replica 2 waits for "
        r"replica 0 .* among replicas 0, 2; replica 0 waits for replica 1 .* among replicas 0, 1; "
        r"replica 1 waits for replica 3 .* among replicas 1, 3\."
    )
    with pytest.raises(PjrtError, match=expected):
        replicas[3].meet(rows, 3)


def test_replicas_may_meet_in_groups_that_overlap_if_nobody_waits_in_a_circle(
    replicas: list[Agreement],
) -> None:
    rows, columns = (SUM, ((0, 1), (2, 3))), (MAX, ((0, 2), (1, 3)))
    both, first, second = _program(rows, columns, rows, SUM), _program(rows), _program(columns, rows, SUM)
    for _ in range(3):
        for replica in (3, 0, 2, 1):
            for program in (first, second) if replica % 2 else (both,):
                replicas[replica].meet(program, replica)


def test_replicas_that_meet_their_groups_in_another_order_are_an_error(replicas: list[Agreement]) -> None:
    pair = (SUM, ((0, 1), (2, 3)))
    replicas[0].meet(_program(pair, MAX), 0)
    with pytest.raises(
        PjrtError, match=r"replica 1 waits for replica 0 in .*maximum.* among replicas 0, 1, 2, 3"
    ):
        replicas[1].meet(_program(MAX, pair), 1)


def test_a_process_of_another_machine_has_a_board_of_its_own() -> None:
    store = _Store()
    first = Agreement(store, BridgeSettings(secret=SECRET, replicas=4, processes=2, process=0))
    # A process there with the same number has another file.
    pid, number, _ = json.loads(unsealed(SECRET, KEY, store.blocking_key_value_get_bytes(KEY, 0)))
    address = json.dumps([pid, number, "00"]).encode()
    store.key_value_set_bytes(KEY, sealed(SECRET, KEY, address))
    other = Agreement(store, BridgeSettings(secret=SECRET, replicas=4, processes=2, process=1))
    first.meet(_program(SUM), 0)
    other.meet(_program(MAX), 2)
    with pytest.raises(PjrtError, match="replicas disagree"):
        other.meet(_program(SUM), 3)
