"""When replicas of a TPU count as stalled: pure accounts, without processes."""

from __future__ import annotations

import pytest

from polyxla.tpu.monitor import stalls
from polyxla.tpu.monitor.stalls import Account, Accounts

WAITING = Account(in_device=True, seconds=10, line="train.py:7")
AWAY = Account(in_device=False, seconds=1000)


def accounts_of(*accounts: Account, timeout_s: float = 10) -> Accounts:
    accounts_ = Accounts(timeout_s)
    for ordinal, account in enumerate(accounts):
        accounts_.add(ordinal, account)
    return accounts_


def test_replicas_in_their_devices_wait_for_one_elsewhere() -> None:
    found = accounts_of(WAITING, Account(False, 11, "train.py:3"), Account(True, 9, "train.py:7")).stall()
    assert found is not None
    assert found.waiting == (0, 2)
    assert found.text == (
        "replicas 0, 2 wait at train.py:7; replica 1 is at train.py:3, with no work for the device\n"
        "All replicas must take part in each step. They may wait for each other for "
        "POLYXLA_STALL_TIMEOUT_S=10 seconds."
    )


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Account(in_device=True, seconds=1000, line="train.py:3"), id="in-its-device"),
        pytest.param(Account(in_device=False, seconds=9.9, line="train.py:3"), id="elsewhere-for-a-while"),
    ],
)
def test_nothing_ends_replicas_that_compute_or_compile(other: Account) -> None:
    assert accounts_of(WAITING, other).stall() is None


def test_nothing_ends_replicas_that_are_all_elsewhere() -> None:
    assert accounts_of(AWAY, AWAY).stall() is None


def test_nothing_is_concluded_from_old_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that holds the GIL sends none."""
    monkeypatch.setattr(stalls, "FRESH_S", 0.0)
    assert accounts_of(WAITING, AWAY).stall() is None


def test_a_replica_that_has_returned_is_missed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    given = accounts_of(Account(False, has_returned=True), timeout_s=1e-9)
    monkeypatch.setattr(stalls, "FRESH_S", 60.0)
    given.add(1, WAITING)
    found = given.stall()
    assert found is not None
    assert found.text.startswith("replica 1 waits at train.py:7; replica 0 returned\n")
    assert given.returned == [0]


def test_replicas_may_wait_without_limit() -> None:
    assert accounts_of(WAITING, Account(False, 1e9), timeout_s=float("inf")).stall() is None


def test_those_that_are_missing_are_named_with_their_hosts() -> None:
    given = Accounts(10)
    given.add(0, WAITING, "host 0 (a)")
    given.add(1, Account(False, 11, "train.py:3"), "host 1 (b)")
    given.add(2, Account(False, 11, "train.py:3"), "host 1 (b)")
    given.add(3, Account(False, 12, "train.py:3"), "host 2 (c)")
    found = given.stall()
    assert found is not None
    assert found.text.partition("\n")[0] == (
        "replica 0 waits at train.py:7; replicas 1, 2 on host 1 (b) are at train.py:3, with no work for the "
        "device; replica 3 on host 2 (c) is at train.py:3, with no work for the device"
    )
