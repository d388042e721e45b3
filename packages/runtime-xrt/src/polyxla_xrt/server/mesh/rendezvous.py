"""What the mesh service decides: who takes part, who waits for whom, and what each is answered.

Pure: no grpc, no clock, no thread. Not safe to be used by several threads at once.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from polyxla_xrt.protocol.mesh import format_ordinals


class Kind(enum.Enum):
    """Why a call fails."""

    REFUSED = enum.auto()
    """The caller may not take part."""
    DISAGREEMENT = enum.auto()
    """The participants of a tag contradict each other."""
    MISSING = enum.auto()
    """Some did not arrive in time."""
    GONE = enum.auto()
    """Some cannot arrive any more."""


@dataclass(frozen=True)
class Failure:
    """The answer to a call that fails; `text` is for a person, without its full stop."""

    kind: Kind
    text: str


Answer = tuple[bytes, ...] | Failure
"""The payloads in the order of their ordinals, or why there are none."""


@dataclass(frozen=True, eq=False)
class Arrival:
    """A participant's call; two are never equal.

    Attributes:
        tag: the name under which its participants meet.
        ordinal: who arrives.
        payload: what it brings.
        replicas: whom it wants to meet, itself among them; none for all.
        deadline: when it gives up, on the clock of `Mesh.expire`.
        answer: called once, from whichever call settles it.
    """

    tag: str
    ordinal: int
    payload: bytes
    replicas: tuple[int, ...]
    deadline: float
    answer: Callable[[Answer], None]


@dataclass
class _Failed:
    """A tag that failed, and those who have not heard of it: they would wait for the others in vain."""

    failure: Failure
    owed: set[int]


@dataclass
class _Meeting:
    replicas: tuple[int, ...]
    arrivals: list[Arrival] = field(default_factory=list)

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.replicas) - {one.ordinal for one in self.arrivals}))


class Mesh:
    """The participants of a job and where they wait for each other.

    Args:
        world_size: number of participants, at least 1.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._attending: set[int] = set()
        self._gone: dict[int, str] = {}
        self._meetings: dict[str, _Meeting] = {}
        self._failed: dict[str, _Failed] = {}

    @property
    def staying(self) -> tuple[int, ...]:
        """Who has neither said goodbye nor died; those that never came are among them."""
        return tuple(one for one in range(self.world_size) if one not in self._gone)

    def attend(self, ordinal: int, world_size: int) -> Failure | None:
        """Take in a participant, or say why not."""
        text = None
        if world_size != self.world_size:
            text = (
                f"Ordinal {ordinal} was told of {world_size} replicas, the mesh service of {self.world_size}"
            )
        elif ordinal >= self.world_size:
            text = f"Invalid ordinal: {ordinal}, of {self.world_size} replicas"
        elif ordinal in self._attending:
            text = f"Duplicate ordinal: {ordinal} takes part already"
        elif ordinal in self._gone:
            text = f"Ordinal {ordinal} {self._gone[ordinal]}, and cannot come back"
        if text:
            return Failure(Kind.REFUSED, text)
        self._attending.add(ordinal)
        return None

    def arrive(self, arrival: Arrival) -> None:
        """Let a participant wait at a tag; whoever completes or spoils it has all of them answered."""
        tag, ordinal = arrival.tag, arrival.ordinal
        if ordinal in range(self.world_size) and ordinal not in self._attending | self._gone.keys():
            # Nobody would notice its death.
            arrival.answer(Failure(Kind.REFUSED, f"Ordinal {ordinal} has not attended"))
            return
        failed = self._failed.get(tag)
        if failed and ordinal in failed.owed:
            self._forgive(tag, ordinal)
            arrival.answer(failed.failure)
            return
        wanted = self._wanted(arrival)
        meeting = self._meetings.setdefault(tag, _Meeting(wanted))
        failure = self._problem(meeting, arrival, wanted)
        meeting.arrivals.append(arrival)
        if failure:
            self._fail(tag, failure)
        elif not meeting.missing:
            self._complete(tag)

    def withdraw(self, arrival: Arrival) -> None:
        """Forget a call that waits no longer, such as one that was interrupted. Its answer is not called."""
        meeting = self._meetings.get(arrival.tag)
        if meeting and arrival in meeting.arrivals:
            meeting.arrivals.remove(arrival)
            if not meeting.arrivals:
                del self._meetings[arrival.tag]

    def expire(self, now: float) -> None:
        """Fail what has waited until its deadline. A tag has the earliest of those who wait."""
        for tag, meeting in list(self._meetings.items()):
            if min(one.deadline for one in meeting.arrivals) <= now:
                text = f"Ordinals missing at the deadline: {format_ordinals(meeting.missing)}"
                unseen = tuple(one for one in meeting.missing if one not in self._attending)
                text += f" (of these never connected: {format_ordinals(unseen)})" if unseen else ""
                self._fail(tag, Failure(Kind.MISSING, text))

    def leave(self, ordinal: int) -> None:
        """Note that a participant has said goodbye."""
        self._go(ordinal, "has said goodbye")

    def lose(self, ordinal: int) -> None:
        """Note that a participant is dead, or out of reach. Nothing changes if it has said goodbye."""
        self._go(ordinal, "died or lost its connection")

    def _go(self, ordinal: int, how: str) -> None:
        if ordinal not in self._attending:
            return
        self._attending.remove(ordinal)
        self._gone[ordinal] = how
        for tag in list(self._failed):
            self._forgive(tag, ordinal)
        for tag, meeting in list(self._meetings.items()):
            if ordinal in meeting.replicas:
                self._fail(tag, self._is_gone((ordinal,)))

    def _wanted(self, arrival: Arrival) -> tuple[int, ...]:
        return tuple(sorted(arrival.replicas)) or tuple(range(self.world_size))

    def _problem(self, meeting: _Meeting, arrival: Arrival, wanted: tuple[int, ...]) -> Failure | None:
        """Say what an arrival spoils. The texts begin like those of torch_xla 1.13's mesh_service.cc."""
        ordinal, text = arrival.ordinal, None
        strangers = tuple(one for one in wanted if one >= self.world_size)
        twice = tuple(one for one, count in Counter(wanted).items() if count > 1)
        if ordinal >= self.world_size or strangers:
            wrong = (ordinal,) if ordinal >= self.world_size else strangers
            text = f"Invalid ordinal: {format_ordinals(wrong)}, of {self.world_size} replicas"
        elif twice:
            text = f"Duplicate ordinal: {format_ordinals(twice)}, in the replicas that ordinal {ordinal} asks for"
        elif ordinal not in wanted:
            text = f"Invalid ordinal: {ordinal} is not one of its replicas ({format_ordinals(wanted)})"
        elif wanted != meeting.replicas:
            text = f"Mismatching replicas: ({format_ordinals(meeting.replicas)}) vs. ({format_ordinals(wanted)}) of {ordinal}"
        elif any(one.ordinal == ordinal for one in meeting.arrivals):
            text = f"Duplicate ordinal: {ordinal} waits here already"
        if text:
            return Failure(Kind.DISAGREEMENT, text)
        gone = tuple(one for one in wanted if one in self._gone)
        return self._is_gone(gone) if gone else None

    def _is_gone(self, ordinals: tuple[int, ...]) -> Failure:
        how = sorted({self._gone[one] for one in ordinals})
        parts = (f"{format_ordinals(tuple(one for one in ordinals if self._gone[one] == text))} {text}" for text in how)
        return Failure(Kind.GONE, "Ordinal " + "; ordinal ".join(parts))

    def _complete(self, tag: str) -> None:
        arrivals = sorted(self._meetings.pop(tag).arrivals, key=lambda one: one.ordinal)
        payloads = tuple(one.payload for one in arrivals)
        for one in arrivals:
            one.answer(payloads)

    def _fail(self, tag: str, failure: Failure) -> None:
        meeting = self._meetings.pop(tag)
        if failure.kind is not Kind.GONE:
            # Who comes later is told the same, once. Of the dead it will hear anyway, if it needs them.
            wanted = {one for arrival in meeting.arrivals for one in self._wanted(arrival)}
            told = {one.ordinal for one in meeting.arrivals}
            owed = {one for one in wanted - told - self._gone.keys() if one < self.world_size}
            if owed:
                self._failed[tag] = _Failed(failure, owed)
        for one in meeting.arrivals:
            one.answer(failure)

    def _forgive(self, tag: str, ordinal: int) -> None:
        failed = self._failed[tag]
        failed.owed.discard(ordinal)
        if not failed.owed:
            del self._failed[tag]
