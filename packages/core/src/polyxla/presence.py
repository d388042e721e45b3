"""The replicas that this process runs, and where each of them is: for messages about those that wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace

from polyxla import callsite


@dataclass(frozen=True)
class Position:
    """Where one replica is.

    Attributes:
        ordinal: the replica's ordinal.
        steps: number of its optimizer updates; None if nobody counts them, as in a plain torch_xla program.
        has_returned: whether its function has returned, and its device has finished its work.
        line: ``file:line`` of the user's innermost frame; None if none is running.
    """

    ordinal: int
    steps: int | None = None
    has_returned: bool = False
    line: str | None = None


_replicas: dict[int, Callable[[], Position]] = {}
_step_counts: dict[int, Callable[[], int]] = {}
_listeners: list[Callable[[Position], None]] = []


@contextlib.contextmanager
def running(ordinal: int) -> Iterator[None]:
    """Return a context in which the calling thread is a replica; leave it when the device has finished."""
    thread = threading.get_ident()

    def position() -> Position:
        count = _step_counts.get(ordinal)
        return Position(ordinal, count and count(), line=callsite.user_line(thread))

    _step_counts.pop(ordinal, None)
    _replicas[ordinal] = position
    _notify(Position(ordinal))
    yield
    # Not after an exception, which the launching process gets instead.
    final = replace(position(), has_returned=True, line=None)
    # Also lets go of the replica's module and optimizers.
    _step_counts.pop(ordinal, None)
    _replicas[ordinal] = lambda: final
    _notify(final)


def count_steps(ordinal: int, count: Callable[[], int]) -> None:
    """Take the number of a running replica's optimizer updates from `count` from now on."""
    _step_counts[ordinal] = count


def _notify(position: Position) -> None:
    for listener in _listeners:
        listener(position)


def listen(listener: Callable[[Position], None]) -> None:
    """Call `listener` in a replica's thread when the replica starts, and when it has returned."""
    _listeners.append(listener)


def forget() -> None:
    """Forget everything: this process is a fork of one that ran replicas itself."""
    _replicas.clear()
    _step_counts.clear()
    _listeners.clear()


def positions() -> list[Position]:
    """Return where each replica of this process is, in the order of the ordinals."""
    return [_replicas[ordinal]() for ordinal in sorted(_replicas)]


def unequal(positions: Iterable[Position], waiting: Container[int]) -> str | None:
    """Describe all replicas, if some have returned and others wait for them; None if none has returned.

    Args:
        positions: where each replica is, as far as it is known.
        waiting: ordinals of the replicas that wait; the others may be anywhere.
    """
    known = sorted(positions, key=lambda one: (not one.has_returned, one.ordinal))
    if not known or not known[0].has_returned:
        return None
    # Those that have returned took part in no later step: whatever a replica has traced and submitted since,
    # this is the step in which its device waits.
    limit = min((one.steps for one in known if one.has_returned and one.steps is not None), default=None)
    accounts: dict[tuple[str, str, str], list[int]] = {}
    for one in known:
        accounts.setdefault(_account(one, one.ordinal in waiting, limit), []).append(one.ordinal)
    return "; ".join(
        f"{named(ordinals)} {singular if len(ordinals) == 1 else plural}{where}"
        for (singular, plural, where), ordinals in accounts.items()
    )


def _account(one: Position, waits: bool, limit: int | None) -> tuple[str, str, str]:
    """Return what a replica does, in the singular and in the plural, and where."""
    if one.has_returned:
        count = "" if one.steps is None else f" after {one.steps} step{'' if one.steps == 1 else 's'}"
        return "returned", "returned", count
    step = (
        "" if one.steps is None else f" in step {min(one.steps, one.steps if limit is None else limit) + 1}"
    )
    where = f"{step} at {one.line}" if one.line else f"{step}, at the end of its function"
    return ("waits", "wait", where) if waits else ("is", "are", where)


def named(ordinals: Iterable[int]) -> str:
    """Return ``replica 3``, ``replicas 0, 1`` or ``replicas 0-7``."""
    numbers = sorted(ordinals)
    if len(numbers) == 1:
        return f"replica {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"replicas {numbers[0]}-{numbers[-1]}"
    return f"replicas {', '.join(map(str, numbers))}"
