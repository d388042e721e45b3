"""Comparing the collectives of replicas before they meet.

gloo lets a sum meet a maximum, and ends the process if their sizes differ. So each replica writes what it is
about to do on a board in memory that all processes of a machine share, and then reads what the others have
written. Nobody waits: of two replicas, the one that comes second sees what the first has written, and does
not join. Replicas on different machines are not compared.

For each group of replicas that meet, a replica has a channel on the board: the number of its collectives so
far, and a ring of their digests. The n-th collective of one must be the n-th of the others, whatever programs
they are in.

Groups that overlap have no channel in common: replica 0 may wait for replica 1 in one group, and replica 1
for replica 0 in another. So a replica also writes in which order its program meets its groups, and once any
group is a part of the replicas, looks whether they wait for each other in a circle.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyxla_bridge.abi import Code
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.executable import Executable
from polyxla_bridge.sealing import sealed, unsealed
from polyxla_bridge.shared_file import SharedFile

DISAGREE = "replicas disagree"
"""What a report of a disagreement begins with; the launcher knows it too."""
RING = 1024
"""Collectives of a group that are kept for the others to compare."""
GROUPS = 16
"""Groups in which a replica may meet others; collectives of further groups are not compared."""
TEXT_BYTES = 1 << 16
"""Room for a replica's descriptions of its collectives; those that do not fit are reported without one."""
_KEY = "polyxla/board"
_TIMEOUT_S = 60
_WORD = 8
# The first word of a channel is the group, and the second is the number of collectives.
_HEADER_WORDS = 2
_CHANNEL_WORDS = _HEADER_WORDS + RING
# The first word says whether any replica meets only some of the others.
_DIVIDED = 0
_BOARD_WORDS = 1
RUNS = 256
"""Changes of the group in a program that are kept; a replica with more counts as not waiting."""
# The program begins with a version, which is odd while the program is written, and with the number of runs.
# Each run has three words: its group, its first number and its end.
_PROGRAM_WORDS = 2 + 3 * RUNS
_TEXT = _PROGRAM_WORDS + GROUPS * _CHANNEL_WORDS
_AREA_WORDS = _TEXT + TEXT_BYTES // _WORD


@dataclass
class CollectiveRun:
    """Collectives of one group that a program calls without another group's in between.

    Attributes:
        group: digest of the group.
        first: the number of the first of them, among all of the group.
        end: the number behind the last.
    """

    group: int
    first: int
    end: int


@dataclass(frozen=True)
class Program:
    """What one replica does in a program.

    Attributes:
        channels: by the groups that it meets.
        runs: the channels' numbers in the program's order, each with its number of collectives in a row.
        groups: the groups that it meets, in the program's order.
        is_divided: whether it meets only some of the replicas.
    """

    channels: tuple[Channel, ...]
    runs: tuple[tuple[int, int], ...]
    groups: tuple[frozenset[int], ...]
    is_divided: bool


@dataclass(frozen=True)
class Channel:
    """What one replica does with one group of replicas in a program.

    Attributes:
        group: digest of the group.
        others: the other replicas of the group.
        digests: of the collectives, in order.
        texts: their descriptions.
    """

    group: int
    others: tuple[int, ...]
    digests: memoryview
    texts: tuple[str, ...]


class Agreement:
    """The replicas of this process, and those on the same machine that they compare themselves with.

    Args:
        link: jaxlib's connection to the job's key-value store.
        settings: of the job.
    """

    def __init__(self, link: Any, settings: BridgeSettings) -> None:
        self._replicas = settings.replicas
        self._size = (_BOARD_WORDS + settings.replicas * _AREA_WORDS) * _WORD
        self._memory = self._share(link, settings) if settings.processes > 1 else self._own()
        self._words = memoryview(self._memory).cast("Q")
        self._places: dict[tuple[int, int], int] = {}
        self._described: dict[int, int] = {}
        self._groups: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def _own(self) -> mmap.mmap:
        return mmap.mmap(-1, self._size)

    def _share(self, link: Any, settings: BridgeSettings) -> mmap.mmap:
        """Return the board of process 0, or if it is on another machine, one of this process's own."""
        if settings.process == 0:
            # The others open the file by its address, so this process keeps it open.
            file = SharedFile.make("polyxla-board", self._size)
            address = json.dumps(file.address).encode()
            link.key_value_set_bytes(_KEY, sealed(settings.secret, _KEY, address), allow_overwrite=True)
            return mmap.mmap(file.descriptor, self._size)
        found = link.blocking_key_value_get_bytes(_KEY, _TIMEOUT_S * 1000)
        try:
            address = json.loads(unsealed(settings.secret, _KEY, found))
        except ValueError as error:
            raise PjrtError(Code.FAILED_PRECONDITION, str(error)) from error
        opened = SharedFile.open(address, self._size)
        if opened is not None:
            board = mmap.mmap(opened.descriptor, self._size)
            opened.close()
            return board
        return self._own()

    def program(self, executable: Executable, replica: int) -> Program:
        """Return what a replica does in a program."""
        found: dict[frozenset[int], list[str]] = {}
        order: list[frozenset[int]] = []
        # The program numbers its own devices; replicas with other programs only know the job's numbers.
        every = executable.devices or tuple(range(self._replicas))
        for text, groups in executable.meets:
            listed = [frozenset(every[member] for member in group) for group in groups] or [frozenset(every)]
            mine = next((group for group in listed if replica in group), frozenset())
            # A replica that is alone in its group waits for no other.
            if len(mine) > 1:
                found.setdefault(mine, []).append(text)
                order.append(mine)
        channels = [
            Channel(
                _digest(repr(sorted(group))),
                tuple(sorted(group - {replica})),
                memoryview(b"".join(_digest(text).to_bytes(_WORD, "little") for text in texts)).cast("Q"),
                tuple(texts),
            )
            for group, texts in found.items()
        ]
        numbers = {group: number for number, group in enumerate(found)}
        runs = [(numbers[group], len(list(row))) for group, row in itertools.groupby(order)]
        # All devices of a partitioned program run the same code, so they meet their groups in the same order.
        is_whole = executable.num_partitions > 1 or all(len(group) == self._replicas for group in found)
        return Program(tuple(channels), tuple(runs), tuple(found), not is_whole)

    def meet(self, executable: Executable, replica: int) -> Program:
        """Compare a program's collectives with those of the others before the replica joins them.

        Returns:
            What the replica does in the program.

        Raises:
            PjrtError: another replica does something else in its turn, or waits in another group.
        """
        known: dict[int, Program] = executable.native.setdefault("meets", {})
        if replica not in known:
            known[replica] = self.program(executable, replica)
            # The descriptions come before the digests: a replica that finds a digest looks up what it means.
            self._describe(replica, known[replica].channels)
        program = known[replica]
        if not program.channels:
            return program
        starts = self._write(program, replica)
        # The lock is a memory barrier: without it, the processor could do the reads below before the writes
        # above, and two replicas that come at the same time would both miss the other.
        with self._lock:
            pass
        for channel, start in zip(program.channels, starts, strict=True):
            self._compare(channel, replica, start)
        if self._words[_DIVIDED]:
            self._look_for_circle(replica)
        return program

    def _write(self, program: Program, replica: int) -> list[int | None]:
        """Write a program on the board; return the number of the first collective of each channel."""
        words, area = self._words, self._area(replica)
        if program.is_divided:
            words[_DIVIDED] = 1
        # While the version is odd, others do not read the program.
        words[area] += 1
        places = [self._place(replica, channel.group, is_new=True) for channel in program.channels]
        starts = [None if place is None else words[place + 1] for place in places]
        for channel, place, start in zip(program.channels, places, starts, strict=True):
            if place is None or start is None:
                continue
            end = start + len(channel.digests)
            for first, last in _pieces(max(start, end - RING), end):
                words[_slots(place, first, last)] = channel.digests[first - start : last - start]
            # The number comes after the digests: others read the digests up to it.
            words[place + 1] = end
        reached = list(starts)
        at = area + 2
        # A replica whose runs are not all on the board counts as not waiting, because a circle that is found
        # through it could be wrong.
        is_known = len(program.runs) <= RUNS and None not in starts
        for number, length in program.runs if is_known else ():
            first = reached[number] or 0
            reached[number] = first + length
            words[at], words[at + 1], words[at + 2] = program.channels[number].group, first, first + length
            at += 3
        words[area + 1] = len(program.runs) if is_known else 0
        words[area] += 1
        return starts

    def _compare(self, channel: Channel, replica: int, start: int | None) -> None:
        place = self._place(replica, channel.group)
        if place is None or start is None:
            return
        words, end = self._words, start + len(channel.digests)
        for other in channel.others:
            there = self._place(other, channel.group)
            if there is None:
                # The other has not met this group yet. It compares itself with this replica when it does.
                continue
            # The ring no longer has older digests than these, of this replica or of the other.
            reached = words[there + 1]
            for first, last in _pieces(max(start, end - RING, reached - RING), min(end, reached)):
                mine, theirs = words[_slots(place, first, last)], words[_slots(there, first, last)]
                if mine != theirs:
                    number = next(n for n in range(last - first) if mine[n] != theirs[n])
                    text = self._description(other, theirs[number])
                    raise different(replica, channel.texts[first - start + number], other, text)

    def _look_for_circle(self, replica: int) -> None:
        """Raise an error if the replica waits for itself, over others that wait in other groups.

        A replica waits in its first collective that one of its group has not reached. Where another has moved
        on since it was read, it can only wait for less, so a circle, once found, cannot dissolve.
        """
        programs = {index: runs for index in range(self._replicas) if (runs := self._runs(index))}
        members = {
            run.group: self._members(index, run.group) for index, runs in programs.items() for run in runs
        }
        # Each replica is moved on to the first collective that it cannot pass. Others may then pass more, so
        # this is repeated until no replica moves.
        waits: dict[int, list[int]] = {}
        is_moving = True
        while is_moving:
            is_moving = False
            for index, runs in programs.items():
                while runs:
                    head = runs[0]
                    ends = {
                        other: self._reached(other, head.group, programs) for other in members[head.group]
                    }
                    waits[index] = [other for other, end in ends.items() if end <= head.first]
                    reached = min([head.end, *ends.values()])
                    is_moving |= reached > head.first
                    head.first = max(head.first, reached)
                    if head.first < head.end:
                        break
                    runs.pop(0)
        # A replica without runs, because it has done them or because they are not known, is not waiting: no
        # circle leads through it.
        blocked = {index: [other for other in waits[index] if programs.get(other)] for index in programs}
        if circle := _circle(blocked, replica):
            raise self._waiting([(member, programs[member][0]) for member in circle])

    def _runs(self, replica: int) -> list[CollectiveRun]:
        """Return the runs of a replica's program; none while it writes them."""
        words, area = self._words, self._area(replica)
        version, count = words[area], words[area + 1]
        flat = list(words[area + 2 : area + 2 + 3 * count])
        # What was read while the replica wrote may be a mixture of two programs.
        if version % 2 or words[area] != version:
            return []
        return [CollectiveRun(*flat[at : at + 3]) for at in range(0, len(flat), 3)]

    def _reached(self, replica: int, group: int, programs: dict[int, list[CollectiveRun]]) -> int:
        """Return the number of the collective of a group that a replica gets to without the others."""
        runs = programs.get(replica, [])
        for number, run in enumerate(runs):
            if run.group == group:
                # Only others keep a replica from ending its first run. It comes to a later run only after
                # those before it.
                return run.first if number else run.end
        place = self._place(replica, group)
        return 0 if place is None else self._words[place + 1]

    def _members(self, replica: int, group: int) -> list[int]:
        if group not in self._groups:
            # A group that found no room on the board has another text, without numbers.
            text = self._description(replica, group)
            self._groups[group] = [int(part) for part in text.split(", ")] if text[:1].isdigit() else []
        return self._groups[group]

    def _waiting(self, circle: Sequence[tuple[int, CollectiveRun]]) -> PjrtError:
        parts = []
        for (member, run), (other, _) in zip(circle, [*circle[1:], circle[0]], strict=True):
            place = self._place(member, run.group)
            assert place is not None
            text = self._description(member, self._words[_slots(place, run.first, run.first + 1)][0])
            group = ", ".join(map(str, self._groups[run.group]))
            parts.append(f"replica {member} waits for replica {other} in {text} among replicas {group}")
        return PjrtError(
            Code.FAILED_PRECONDITION,
            f"{DISAGREE}: {'; '.join(parts)}. All replicas must call the same collectives, in the same order "
            "and with the same groups",
        )

    def _area(self, replica: int) -> int:
        return _BOARD_WORDS + replica * _AREA_WORDS

    def _place(self, replica: int, group: int, *, is_new: bool = False) -> int | None:
        """Return where a replica's channel begins; None if it has none."""
        # Only a channel that exists is remembered, because its replica may make a missing one at any time.
        # Only the replica's own thread does, so no lock is needed.
        if (replica, group) not in self._places:
            for number in range(GROUPS):
                place = self._area(replica) + _PROGRAM_WORDS + number * _CHANNEL_WORDS
                if is_new and not self._words[place]:
                    self._words[place] = group
                if self._words[place] == group:
                    self._places[replica, group] = place
                    break
        return self._places.get((replica, group))

    def _describe(self, replica: int, channels: Sequence[Channel]) -> None:
        """Write the descriptions of collectives, for others to name them."""
        start = (self._area(replica) + _TEXT) * _WORD
        named = {_digest(text): text for channel in channels for text in channel.texts}
        for channel in channels:
            named[channel.group] = ", ".join(map(str, sorted([*channel.others, replica])))
        for digest, text in named.items():
            line = f"{digest:x} {text}\n".encode()
            used = self._described.get(replica, 0)
            # Programs have many descriptions in common, and the room is limited.
            if used + len(line) <= TEXT_BYTES and line not in self._memory[start : start + used]:
                self._memory[start + used : start + used + len(line)] = line
                self._described[replica] = used + len(line)

    def _description(self, replica: int, digest: int) -> str:
        start = (self._area(replica) + _TEXT) * _WORD
        lines = self._memory[start : start + TEXT_BYTES].split(b"\n")
        begin = f"{digest:x} ".encode()
        found = next((line for line in lines if line.startswith(begin)), None)
        return found.removeprefix(begin).decode() if found else "another collective"


def _circle(blocked: Mapping[int, Sequence[int]], start: int) -> list[int]:
    """Return the shortest way from a replica, along those that each waits for, back to itself.

    It is empty if there is none.
    """
    ways, seen = [[start]], {start}
    while ways:
        way = ways.pop(0)
        for other in blocked.get(way[-1], ()):
            if other == start:
                return way
            if other not in seen:
                seen.add(other)
                ways.append([*way, other])
    return []


def _pieces(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Divide the numbers of collectives where the ring ends."""
    while first < last:
        end = min(last, first + RING - first % RING)
        yield first, end
        first = end


def _slots(place: int, first: int, last: int) -> slice:
    begin = place + _HEADER_WORDS + first % RING
    return slice(begin, begin + last - first)


def _digest(text: str) -> int:
    # A digest is never 0, because 0 marks a channel without a group.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:_WORD], "little") or 1


def different(replica: int, mine: str, other: int, theirs: str) -> PjrtError:
    """Return the error for two replicas that call different collectives in the same turn."""
    first, second = sorted([(replica, mine), (other, theirs)])
    return PjrtError(
        Code.FAILED_PRECONDITION,
        f"{DISAGREE}: in the same turn, replica {first[0]} calls {first[1]} and replica {second[0]} "
        f"{second[1]}. All replicas must call the same collectives, in the same order and with the same "
        "shapes and dtypes",
    )
