"""Comparing the collectives of replicas before they meet.

gloo lets a sum meet a maximum, and ends the process if their sizes differ. So each replica writes what it is
about to do on a board in memory that all processes of a machine share, and then reads what the others have
written. Nobody waits: of two replicas, the one that comes second sees what the first has written, and does
not join. Replicas on different machines are not compared.

For each group of replicas that meet, a replica has a channel on the board: the number of its collectives so
far, and a ring of their digests. The n-th collective of one must be the n-th of the others, whatever programs
they are in.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyxla_bridge.abi import Code
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.executable import Executable
from polyxla_bridge.sealing import sealed, unsealed

DISAGREE = "replicas disagree"
"""What a report of a disagreement begins with; the launcher knows it too."""
RING = 1024
"""Collectives of a group that are kept for the others to compare."""
GROUPS = 16
"""Groups in which a replica may meet others; those of further groups are not compared."""
TEXT_BYTES = 1 << 16
"""Room for a replica's descriptions of its collectives; those that do not fit are reported without one."""
_KEY = "polyxla/board"
_TIMEOUT_S = 60
_WORD = 8
# The first word of a channel is the group, the second the number of collectives.
_HEADER_WORDS = 2
_CHANNEL_WORDS = _HEADER_WORDS + RING
_TOKEN_WORDS = 2
_AREA_WORDS = GROUPS * _CHANNEL_WORDS + TEXT_BYTES // _WORD


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
        self._size = (_TOKEN_WORDS + settings.replicas * _AREA_WORDS) * _WORD
        self._memory = self._share(link, settings) if settings.processes > 1 else self._own()
        self._words = memoryview(self._memory).cast("Q")
        self._places: dict[tuple[int, int], int] = {}
        self._described: dict[int, int] = {}
        self._lock = threading.Lock()

    def _own(self) -> mmap.mmap:
        return mmap.mmap(-1, self._size)

    def _share(self, link: Any, settings: BridgeSettings) -> mmap.mmap:
        """Return the board of process 0, or if it is on another machine, one of this process's own."""
        if settings.process == 0:
            number = os.memfd_create("polyxla-board")
            os.ftruncate(number, self._size)
            board, token = mmap.mmap(number, self._size), os.urandom(_TOKEN_WORDS * _WORD)
            board[: len(token)] = token
            # The others open it by the name that /proc has for it, so it stays open.
            address = json.dumps([os.getpid(), number, token.hex()]).encode()
            link.key_value_set_bytes(_KEY, sealed(settings.secret, _KEY, address), allow_overwrite=True)
            return board
        found = link.blocking_key_value_get_bytes(_KEY, _TIMEOUT_S * 1000)
        try:
            host, number, token = json.loads(unsealed(settings.secret, _KEY, found))
        except ValueError as error:
            raise PjrtError(Code.FAILED_PRECONDITION, str(error)) from error
        # A process of another machine may have the same number, with another file or none.
        with contextlib.suppress(OSError, ValueError), Path(f"/proc/{host}/fd/{number}").open("r+b") as file:
            board = mmap.mmap(file.fileno(), self._size)
            if board[: _TOKEN_WORDS * _WORD].hex() == token:
                return board
        return self._own()

    def channels(self, executable: Executable, replica: int) -> list[Channel]:
        """Return what a replica does in a program, by the groups that meet."""
        found: dict[frozenset[int], list[str]] = {}
        every = executable.devices or tuple(range(self._replicas))
        for text, groups in executable.meets:
            listed = [frozenset(every[one] for one in group) for group in groups] or [frozenset(every)]
            mine = next((group for group in listed if replica in group), frozenset())
            if len(mine) > 1:
                found.setdefault(mine, []).append(text)
        return [
            Channel(
                _digest(repr(sorted(group))),
                tuple(sorted(group - {replica})),
                memoryview(b"".join(_digest(text).to_bytes(_WORD, "little") for text in texts)).cast("Q"),
                tuple(texts),
            )
            for group, texts in found.items()
        ]

    def meet(self, executable: Executable, replica: int) -> None:
        """Compare a program's collectives with those of the others before the replica joins them.

        Raises:
            PjrtError: another replica does something else in its turn.
        """
        known: dict[int, list[Channel]] = executable.native.setdefault("channels", {})
        if replica not in known:
            known[replica] = self.channels(executable, replica)
            self._describe(replica, known[replica])
        for channel in known[replica]:
            self._compare(channel, replica)

    def _compare(self, channel: Channel, replica: int) -> None:
        place = self._place(replica, channel.group, is_new=True)
        if place is None:
            return
        words, count = self._words, len(channel.digests)
        start = words[place + 1]
        end = start + count
        for first, last in _pieces(max(start, end - RING), end):
            words[_slots(place, first, last)] = channel.digests[first - start : last - start]
        words[place + 1] = end
        # A processor may not move the reads below to before the writes above.
        with self._lock:
            pass
        for other in channel.others:
            there = self._place(other, channel.group)
            if there is None:
                continue
            reached = words[there + 1]
            for first, last in _pieces(max(start, end - RING, reached - RING), min(end, reached)):
                mine, theirs = words[_slots(place, first, last)], words[_slots(there, first, last)]
                if mine != theirs:
                    number = next(n for n in range(last - first) if mine[n] != theirs[n])
                    text = self._description(other, theirs[number])
                    raise different(replica, channel.texts[first - start + number], other, text)

    def _area(self, replica: int) -> int:
        return _TOKEN_WORDS + replica * _AREA_WORDS

    def _place(self, replica: int, group: int, *, is_new: bool = False) -> int | None:
        """Return where a replica's channel begins; None if it has none."""
        if (replica, group) not in self._places:
            for number in range(GROUPS):
                place = self._area(replica) + number * _CHANNEL_WORDS
                if is_new and not self._words[place]:
                    self._words[place] = group
                if self._words[place] == group:
                    self._places[replica, group] = place
                    break
        return self._places.get((replica, group))

    def _describe(self, replica: int, channels: Sequence[Channel]) -> None:
        """Write the descriptions of collectives, for others to name them."""
        start = (self._area(replica) + GROUPS * _CHANNEL_WORDS) * _WORD
        for text in dict.fromkeys(text for channel in channels for text in channel.texts):
            line = f"{_digest(text):x} {text}\n".encode()
            used = self._described.get(replica, 0)
            if used + len(line) <= TEXT_BYTES and line not in self._memory[start : start + used]:
                self._memory[start + used : start + used + len(line)] = line
                self._described[replica] = used + len(line)

    def _description(self, replica: int, digest: int) -> str:
        start = (self._area(replica) + GROUPS * _CHANNEL_WORDS) * _WORD
        lines = self._memory[start : start + TEXT_BYTES].split(b"\n")
        begin = f"{digest:x} ".encode()
        found = next((line for line in lines if line.startswith(begin)), None)
        return found.removeprefix(begin).decode() if found else "another collective"


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
    # Never 0, which is an empty place.
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
