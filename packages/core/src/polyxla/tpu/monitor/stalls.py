"""Deciding whether replicas of a TPU wait for one that does not come.

A replica is *in its device* while that has work of it, and *elsewhere* while it has none. A TPU does not
say which of its programs wait for other replicas. But a replica whose device has worked on one program for
the whole timeout, while another replica has been elsewhere for as long, waits for that one. While all are in
their devices, they compute or compile, however long that takes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from polyxla import presence
from polyxla.env import POLYXLA_STALL_TIMEOUT_S

FRESH_S = 5.0
"""Age up to which a replica's last account counts, in seconds. A process that holds the GIL, as some
compilations do, sends none, and then nothing is known of it."""


@dataclass(frozen=True)
class Account:
    """What one replica does.

    Attributes:
        in_device: whether its device has work.
        seconds: for how long that has been so without a program ending.
        line: ``file:line`` of the user's innermost frame, if there is one.
        has_returned: whether its function has returned.
    """

    in_device: bool
    seconds: float = 0.0
    line: str | None = None
    has_returned: bool = False


@dataclass(frozen=True)
class Stall:
    """Replicas that wait for others.

    Attributes:
        waiting: the ordinals of those in their devices.
        text: where they and the others are; the first line says it all.
    """

    waiting: tuple[int, ...]
    text: str


class Accounts:
    """The last account of each replica, as far as one has arrived.

    Args:
        timeout_s: longest wait of a replica for others, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last: dict[int, tuple[float, Account]] = {}
        self._hosts: dict[int, str] = {}

    def add(self, ordinal: int, account: Account, host: str = "") -> None:
        """Take an account that has just arrived.

        Args:
            ordinal: the replica's.
            account: what it does.
            host: how messages name its host; empty where there is only one.
        """
        self._last[ordinal] = time.monotonic(), account
        self._hosts[ordinal] = f" on {host}" if host else ""

    @property
    def returned(self) -> list[int]:
        """The ordinals of the replicas that have returned."""
        return [ordinal for ordinal, (_, account) in self._last.items() if account.has_returned]

    def stall(self) -> Stall | None:
        """Return which replicas wait for which, if the timeout is over."""
        current = {ordinal: self._current(*last) for ordinal, last in sorted(self._last.items())}
        known = {ordinal: account for ordinal, account in current.items() if account}
        waiting = {ordinal: account for ordinal, account in known.items() if account.in_device}
        elsewhere = {ordinal: account for ordinal, account in known.items() if not account.in_device}
        missing = {ordinal: account for ordinal, account in elsewhere.items() if self._is_late(account)}
        # One late replica in its device is enough: it waits for those that are missing.
        if not missing or not any(map(self._is_late, waiting.values())):
            return None
        return Stall(tuple(waiting), self._describe(waiting, missing))

    def _is_late(self, account: Account) -> bool:
        return account.seconds >= self._timeout_s

    def _current(self, arrived: float, account: Account) -> Account | None:
        """Return an account as of now; None if it is too old. One that has returned sends no other."""
        age_s = time.monotonic() - arrived
        # A replica that has returned sends nothing more, so its time counts on here.
        if account.has_returned:
            return Account(False, age_s, has_returned=True)
        return account if age_s < FRESH_S else None

    def _describe(self, waiting: Mapping[int, Account], missing: Mapping[int, Account]) -> str:
        parts = [f"{_subject(ordinals, 'waits', 'wait')} at {line}" for line, ordinals in _by_line(waiting)]
        for host in dict.fromkeys(self._hosts[ordinal] for ordinal in missing):
            there = {i: account for i, account in missing.items() if self._hosts[i] == host}
            returned = [i for i, account in there.items() if account.has_returned]
            elsewhere = {i: account for i, account in there.items() if not account.has_returned}
            parts += [f"{presence.named(returned)}{host} returned"] if returned else []
            parts += [
                f"{_subject(ordinals, 'is', 'are', host)} at {line}, with no work for the device"
                for line, ordinals in _by_line(elsewhere)
            ]
        return (
            f"{'; '.join(parts)}\nAll replicas must take part in each step. They may wait for each other for "
            f"{POLYXLA_STALL_TIMEOUT_S}={self._timeout_s:g} seconds."
        )


def _by_line(accounts: Mapping[int, Account]) -> Iterable[tuple[str, list[int]]]:
    grouped: dict[str, list[int]] = {}
    for ordinal, account in accounts.items():
        grouped.setdefault(account.line or "the end of its function", []).append(ordinal)
    return grouped.items()


def _subject(ordinals: list[int], singular: str, plural: str, host: str = "") -> str:
    return f"{presence.named(ordinals)}{host} {singular if len(ordinals) == 1 else plural}"
