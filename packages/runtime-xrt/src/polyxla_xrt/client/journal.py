"""What a process needs when its worker is lost: a snapshot of its arrays, and what it sent since."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from polyxla_bridge.programs.executable import ArrayType
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol.bulk_encoding import BulkMessage

LIMIT_BYTES = 1 << 30
"""Data of commands after which a snapshot is taken as soon as that is possible, in bytes."""

Command: TypeAlias = pb.Command | BulkMessage
Sized: TypeAlias = tuple[Command, int]
"""A command, and the size of its data."""


@dataclass(frozen=True)
class LiveArray:
    """An array that exists on the worker.

    Attributes:
        type: its type.
        core: the core that has it.
    """

    type: ArrayType
    core: int


Arrays: TypeAlias = Mapping[int, LiveArray]
NO_ARRAYS: Arrays = MappingProxyType({})


@dataclass(eq=False)
class Snapshot:
    """The arrays of a process at one place among its commands.

    Attributes:
        meetings: how many programs in which replicas meet come before it. Snapshots of all replicas with one
            number fit together: from there, each replica's part of every later program follows.
        position: index of the first command after it, counted from the first of the session.
        arrays: for each array, the commands that upload it; without those that could not be computed.
        done: completes when the snapshot is whole, or was given up.
    """

    meetings: int
    position: int
    arrays: dict[int, list[Sized]]
    done: Future[None] = field(default_factory=Future)


class Journal:
    """The commands of a session, from which another worker can be brought to the same state.

    The client numbers its arrays and programs, and the worker carries out its commands in order. So the same
    commands, sent again, make the same arrays: to the bit, because programs compute the same bits every time.
    A snapshot replaces the commands before it. Thread-safe.

    Replicas meet in collectives, so each must go back as far as the others. A snapshot is therefore taken
    after every `every`-th program with collectives. Before the next such place, a replica waits until its
    last snapshot is whole (`wait_before_meeting`): then no replica has completed two snapshots more than
    another, and with the last two of each, all have one in common.

    Args:
        every: number of programs from one snapshot to the next.
        is_alone: whether this process drives the whole job, so that the last snapshot suffices.
    """

    def __init__(self, every: int, *, is_alone: bool) -> None:
        self._every = every
        self._is_alone = is_alone
        self._lock = threading.Lock()
        self._meetings = 0
        self._snapshots = [Snapshot(0, 0, {})]
        self._pending: Snapshot | None = None
        self._programs: dict[int, list[Sized]] = {}
        self._arrays: dict[int, LiveArray] = {}
        self._uploads: dict[int, list[Sized]] = {}
        self._log: list[Sized] = []
        # Number of commands before the first of the log, and data of those since the last snapshot.
        self._forgotten = self._bytes = 0

    @property
    def newest(self) -> int:
        """`Snapshot.meetings` of the newest whole snapshot."""
        return self._snapshots[-1].meetings

    def add(self, command: Command, size: int, makes: Arrays = NO_ARRAYS, takes: Iterable[int] = ()) -> None:
        """Record a command, in the order in which commands are sent.

        Args:
            command: the command.
            size: the size of its data, in bytes.
            makes: the arrays that exist after it.
            takes: the arrays that do not: released, or donated to a program.
        """
        with self._lock:
            if isinstance(command, pb.Command) and command.HasField("compile"):
                # Programs are compiled before everything else: an execution does not wait for a compiler.
                self._programs.setdefault(command.compile.request, []).append((command, size))
                return
            for number in takes:
                self._arrays.pop(number, None)
                self._uploads.pop(number, None)
            self._arrays |= makes
            if isinstance(command, BulkMessage) or command.HasField("upload"):
                for number in makes:
                    self._uploads.setdefault(number, []).append((command, size))
            self._log.append((command, size))
            self._bytes += size

    def meet(self) -> None:
        """Count a program in which replicas meet, after its command."""
        with self._lock:
            self._meetings += 1

    def wait_before_meeting(self) -> None:
        """Wait until the last snapshot is whole or given up, if the next one follows the next meeting.

        A process that drives the whole job does not wait: its snapshot may need this very program, in which
        its cores meet each other.
        """
        pending = None if self._is_alone else self._pending
        if pending is not None and (self._meetings + 1) % self._every == 0:
            pending.done.result()

    def is_due(self, *, has_met: bool) -> bool:
        """Return whether a snapshot should be taken now, after a command.

        Args:
            has_met: whether the command was counted by `meet`.
        """
        with self._lock:
            if self._pending is not None:
                return False
            if has_met and self._meetings % self._every == 0:
                return True
            # Between two meetings every place has the same number, so a second snapshot there is as good.
            is_free = self._is_alone or self._meetings == self.newest
            return is_free and self._bytes > LIMIT_BYTES

    def begin(self) -> tuple[Snapshot, dict[int, LiveArray]]:
        """Begin a snapshot after the last command; return it, and the arrays that must be read for it."""
        with self._lock:
            known = self._snapshots[-1].arrays
            arrays = {
                number: found
                for number in self._arrays
                if (found := known.get(number) or self._uploads.get(number))
            }
            missing = {number: array for number, array in self._arrays.items() if number not in arrays}
            position = self._forgotten + len(self._log)
            self._pending = Snapshot(self._meetings, position, arrays)
            self._bytes = 0
            return self._pending, missing

    def finish(self, snapshot: Snapshot) -> None:
        """Take over a snapshot whose arrays are complete; without effect if it was given up."""
        with self._lock:
            if self._pending is not snapshot:
                return
            self._pending = None
            older = [each for each in self._snapshots if each.meetings != snapshot.meetings]
            self._snapshots = [*([] if self._is_alone else older[-1:]), snapshot]
            self._forget(self._snapshots[0].position - self._forgotten)
        snapshot.done.set_result(None)

    def _forget(self, count: int) -> None:
        """Drop the first commands of the log, and the programs that these release."""
        for number in _released_programs(self._log[:count]):
            self._programs.pop(number, None)
        del self._log[:count]
        self._forgotten += count

    def give_up(self) -> None:
        """Give up the snapshot that is not whole, if there is one; the next one comes in its turn."""
        with self._lock:
            pending, self._pending = self._pending, None
        if pending is not None:
            pending.done.set_result(None)

    def drop_program(self, number: int) -> None:
        """Forget a program that does not compile; without effect if the number is not a program's."""
        with self._lock:
            self._programs.pop(number, None)

    def compilations(self, meetings: int) -> dict[int, list[Sized]]:
        """Return the commands that compile each program that is used after a snapshot.

        Args:
            meetings: that of the snapshot.

        Raises:
            LookupError: there is no such snapshot.
        """
        with self._lock:
            released = {*_released_programs(self._log[: self._find(meetings).position - self._forgotten])}
            return {number: [*each] for number, each in self._programs.items() if number not in released}

    def _find(self, meetings: int) -> Snapshot:
        for snapshot in self._snapshots:
            if snapshot.meetings == meetings:
                return snapshot
        have = ", ".join(str(each.meetings) for each in self._snapshots)
        raise LookupError(
            f"the replicas have no snapshot in common: another goes back to {meetings} programs, this one "
            f"has {have}"
        )

    def replay(self, meetings: int, is_awaited: Callable[[int], bool]) -> tuple[int, list[Sized]]:
        """Go back to a snapshot; return the number of its arrays, and the commands from nothing until now.

        Args:
            meetings: that of the snapshot; newer ones are dropped, because another replica lacks them.
            is_awaited: returns whether a request still waits for its answer; others are left out.

        Raises:
            LookupError: there is no such snapshot.
        """
        with self._lock:
            found = self._find(meetings)
            self._snapshots = [each for each in self._snapshots if each.meetings <= meetings]
            again = [
                sized
                for sized in self._log[found.position - self._forgotten :]
                if not (request := _request(sized[0])) or is_awaited(request)
            ]
            return len(found.arrays), [
                *(sized for commands in found.arrays.values() for sized in commands),
                *again,
            ]


def _released_programs(log: Iterable[Sized]) -> Iterator[int]:
    for command, _ in log:
        if isinstance(command, pb.Command):
            yield from command.release.programs


def _request(command: Command) -> int:
    """Return the number of a request that is answered with data; 0 if the command has no such answer."""
    if isinstance(command, BulkMessage):
        return 0
    return command.download.request or command.stats.request
