"""The state of the mesh service: who attends, who waits for whom, and the outcome of each rendezvous.

Pure: no gRPC, no clock, no threads. Not thread-safe.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from polyxla_xrt.protocol.mesh import format_ordinals


class FailureKind(enum.Enum):
    """Why a call fails."""

    REFUSED = enum.auto()
    """The caller may not attend."""
    DISAGREEMENT = enum.auto()
    """The participants of a tag contradict each other."""
    MISSING = enum.auto()
    """Some did not arrive in time."""
    GONE = enum.auto()
    """Some cannot arrive any more."""


@dataclass(frozen=True)
class MeshFailure:
    """The outcome of a call that fails; `text` is a sentence for the user, without its full stop."""

    kind: FailureKind
    text: str


Outcome = tuple[bytes, ...] | MeshFailure
"""The payloads in ordinal order, or why there are none."""


@dataclass(frozen=True, eq=False)
class Arrival:
    """A participant's call of a rendezvous; two are never equal.

    Attributes:
        tag: the name of the rendezvous.
        ordinal: the participant.
        payload: its payload.
        replicas: ordinals of the participants that it expects, itself included; empty for all.
        deadline: when it gives up, on the clock of `Mesh.expire`.
        answer: called once with the outcome, by the call of `Mesh` that decides it.
    """

    tag: str
    ordinal: int
    payload: bytes
    replicas: tuple[int, ...]
    deadline: float
    answer: Callable[[Outcome], None]


@dataclass
class _Failed:
    """A failed rendezvous that some participants have not reached yet.

    Attributes:
        failure: its outcome.
        owed: ordinals that get the outcome when they arrive; otherwise they would wait for participants that
            have already failed.
    """

    failure: MeshFailure
    owed: set[int]


@dataclass
class _Rendezvous:
    replicas: tuple[int, ...]
    arrivals: list[Arrival] = field(default_factory=list)

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.replicas) - {arrival.ordinal for arrival in self.arrivals}))


class Mesh:
    """The participants of a job, and the rendezvous in which they wait for each other.

    Args:
        world_size: number of participants, at least 1.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._attending: set[int] = set()
        self._gone: dict[int, str] = {}
        self._rendezvous: dict[str, _Rendezvous] = {}
        self._failed: dict[str, _Failed] = {}

    @property
    def staying(self) -> tuple[int, ...]:
        """The ordinals that have neither said goodbye nor died, including those that never attended."""
        return tuple(ordinal for ordinal in range(self.world_size) if ordinal not in self._gone)

    def attend(self, ordinal: int, world_size: int) -> MeshFailure | None:
        """Admit a participant; return the failure if it is refused."""
        text = None
        if world_size != self.world_size:
            text = f"Ordinal {ordinal} expects {world_size} replicas, the mesh service {self.world_size}"
        elif ordinal >= self.world_size:
            text = f"Invalid ordinal: {ordinal}, of {self.world_size} replicas"
        elif ordinal in self._attending:
            text = f"Duplicate ordinal: {ordinal} already attends"
        # The others have already got the error of its end, so a new process must not take its place.
        elif ordinal in self._gone:
            text = f"Ordinal {ordinal} {self._gone[ordinal]}, and cannot come back"
        if text:
            return MeshFailure(FailureKind.REFUSED, text)
        self._attending.add(ordinal)
        return None

    def arrive(self, arrival: Arrival) -> None:
        """Add a participant to a rendezvous; the arrival that completes or fails it settles it for all."""
        tag, ordinal = arrival.tag, arrival.ordinal
        if ordinal in range(self.world_size) and ordinal not in self._attending | self._gone.keys():
            # Without its attendance stream the service would not notice its death.
            arrival.answer(MeshFailure(FailureKind.REFUSED, f"Ordinal {ordinal} has not attended"))
            return
        failed = self._failed.get(tag)
        if failed and ordinal in failed.owed:
            # It arrives late at a rendezvous that failed, and gets the same failure, once.
            self._settle_owed(tag, ordinal)
            arrival.answer(failed.failure)
            return
        # An invalid or departed ordinal comes this far, because `_problem` has the texts for both.
        wanted = self._wanted(arrival)
        rendezvous = self._rendezvous.setdefault(tag, _Rendezvous(wanted))
        # The check precedes the entry, or every arrival would be its own duplicate. The entry follows in any
        # case, so that `_fail` answers this arrival, too.
        failure = self._problem(rendezvous, arrival, wanted)
        rendezvous.arrivals.append(arrival)
        if failure:
            self._fail(tag, failure)
        elif not rendezvous.missing:
            self._complete(tag)

    def withdraw(self, arrival: Arrival) -> None:
        """Remove a call that no longer waits, such as an interrupted one, without calling its `answer`."""
        rendezvous = self._rendezvous.get(arrival.tag)
        if rendezvous and arrival in rendezvous.arrivals:
            rendezvous.arrivals.remove(arrival)
            if not rendezvous.arrivals:
                # `expire` takes the earliest deadline of the arrivals: there must be one.
                del self._rendezvous[arrival.tag]

    def expire(self, now: float) -> None:
        """Fail every rendezvous whose deadline has passed: the earliest of the participants that wait."""
        for tag, rendezvous in list(self._rendezvous.items()):
            if min(arrival.deadline for arrival in rendezvous.arrivals) <= now:
                text = f"Ordinals missing at the deadline: {format_ordinals(rendezvous.missing)}"
                unseen = tuple(ordinal for ordinal in rendezvous.missing if ordinal not in self._attending)
                # A replica that never connected was not started or cannot reach this host, which is another
                # fault than a replica that hangs.
                text += f" (of these never connected: {format_ordinals(unseen)})" if unseen else ""
                self._fail(tag, MeshFailure(FailureKind.MISSING, text))

    def leave(self, ordinal: int) -> None:
        """Record that a participant has said goodbye."""
        self._go(ordinal, "has said goodbye")

    def lose(self, ordinal: int) -> None:
        """Record that a participant died or is unreachable. No effect after its goodbye."""
        self._go(ordinal, "died or lost its connection")

    def _go(self, ordinal: int, how: str) -> None:
        if ordinal not in self._attending:
            return
        self._attending.remove(ordinal)
        self._gone[ordinal] = how
        # A participant that is gone never collects its failures, which would be kept forever.
        for tag in list(self._failed):
            self._settle_owed(tag, ordinal)
        for tag, rendezvous in list(self._rendezvous.items()):
            # Nobody should wait for the deadline of a rendezvous that cannot complete any more.
            if ordinal in rendezvous.replicas:
                self._fail(tag, self._is_gone((ordinal,)))

    def _wanted(self, arrival: Arrival) -> tuple[int, ...]:
        return tuple(sorted(arrival.replicas)) or tuple(range(self.world_size))

    def _problem(
        self, rendezvous: _Rendezvous, arrival: Arrival, wanted: tuple[int, ...]
    ) -> MeshFailure | None:
        """Return why an arrival fails its rendezvous; the texts begin like those of torch_xla 1.13."""
        ordinal, text = arrival.ordinal, None
        invalid = tuple(ordinal for ordinal in wanted if ordinal >= self.world_size)
        twice = tuple(ordinal for ordinal, count in Counter(wanted).items() if count > 1)
        if ordinal >= self.world_size or invalid:
            wrong = (ordinal,) if ordinal >= self.world_size else invalid
            text = f"Invalid ordinal: {format_ordinals(wrong)}, of {self.world_size} replicas"
        elif twice:
            text = f"Duplicate ordinal: {format_ordinals(twice)}, in the replicas of ordinal {ordinal}"
        elif ordinal not in wanted:
            text = f"Invalid ordinal: {ordinal} is not one of its replicas ({format_ordinals(wanted)})"
        # The first arrival decides the replicas, so the error shows its list first.
        elif wanted != rendezvous.replicas:
            known, given = format_ordinals(rendezvous.replicas), format_ordinals(wanted)
            text = f"Mismatching replicas: ({known}) vs. ({given}) of {ordinal}"
        elif any(arrived.ordinal == ordinal for arrived in rendezvous.arrivals):
            text = f"Duplicate ordinal: {ordinal} already waits here"
        if text:
            return MeshFailure(FailureKind.DISAGREEMENT, text)
        gone = tuple(ordinal for ordinal in wanted if ordinal in self._gone)
        return self._is_gone(gone) if gone else None

    def _is_gone(self, ordinals: tuple[int, ...]) -> MeshFailure:
        how = sorted({self._gone[ordinal] for ordinal in ordinals})
        parts = (
            f"{format_ordinals(tuple(lost for lost in ordinals if self._gone[lost] == text))} {text}"
            for text in how
        )
        return MeshFailure(FailureKind.GONE, "Ordinal " + "; ordinal ".join(parts))

    def _complete(self, tag: str) -> None:
        arrivals = sorted(self._rendezvous.pop(tag).arrivals, key=lambda arrival: arrival.ordinal)
        # The rendezvous is removed already, because an answer may lead to the next call of the same tag.
        payloads = tuple(arrival.payload for arrival in arrivals)
        for arrival in arrivals:
            arrival.answer(payloads)

    def _fail(self, tag: str, failure: MeshFailure) -> None:
        rendezvous = self._rendezvous.pop(tag)
        if failure.kind is not FailureKind.GONE:
            self._remember(tag, rendezvous, failure)
        # The answers come last, because an answer may lead to the next call of the same tag.
        for arrival in rendezvous.arrivals:
            arrival.answer(failure)

    def _remember(self, tag: str, rendezvous: _Rendezvous, failure: MeshFailure) -> None:
        """Keep a failure for the participants that have not arrived: each gets it once, when it arrives.

        Not needed for a participant that is gone: `_problem` finds that again at every later arrival that
        expects it.
        """
        expected = {ordinal for arrival in rendezvous.arrivals for ordinal in self._wanted(arrival)}
        answered = {arrival.ordinal for arrival in rendezvous.arrivals}
        # An ordinal that does not exist never arrives, and its failure would stay forever.
        owed = {ordinal for ordinal in expected - answered - self._gone.keys() if ordinal < self.world_size}
        if owed:
            self._failed[tag] = _Failed(failure, owed)

    def _settle_owed(self, tag: str, ordinal: int) -> None:
        failed = self._failed[tag]
        failed.owed.discard(ordinal)
        if not failed.owed:
            del self._failed[tag]
