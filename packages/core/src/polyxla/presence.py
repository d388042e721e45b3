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
        steps: number of its optimizer updates; None if they are not counted, as in a plain torch_xla program.
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
    # Watchdogs ask for the position from their own threads, and find this thread's stack by its number.
    thread = threading.get_ident()

    def position() -> Position:
        count = _step_counts.get(ordinal)
        return Position(ordinal, count and count(), line=callsite.user_line(thread))

    # An earlier launch in this process may have left its count behind.
    _step_counts.pop(ordinal, None)
    _replicas[ordinal] = position
    _notify(Position(ordinal))
    yield
    # Skipped after an exception: the launching process receives that, and the replica has not returned.
    final = replace(position(), has_returned=True, line=None)
    # The count is a method of the replica, and would keep its module and optimizers alive.
    _step_counts.pop(ordinal, None)
    _replicas[ordinal] = lambda: final
    _notify(final)


def count_steps(ordinal: int, count: Callable[[], int]) -> None:
    """Take the number of a running replica's optimizer updates from `count` from now on."""
    _step_counts[ordinal] = count


def _notify(position: Position) -> None:
    # This runs in the replica's thread: a listener may ask for that thread's device.
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
    known = sorted(positions, key=lambda replica: (not replica.has_returned, replica.ordinal))
    if not known or not known[0].has_returned:
        return None
    # Replicas that have returned took part in no later step, so this is the step in which the devices of the
    # others wait, whatever those have traced and submitted since.
    counts = (replica.steps for replica in known if replica.has_returned)
    limit = min((steps for steps in counts if steps is not None), default=None)
    accounts: dict[tuple[str, str, str], list[int]] = {}
    for replica in known:
        account = _account(replica, replica.ordinal in waiting, limit)
        accounts.setdefault(account, []).append(replica.ordinal)
    return "; ".join(
        f"{named(ordinals)} {singular if len(ordinals) == 1 else plural}{where}"
        for (singular, plural, where), ordinals in accounts.items()
    )


def _account(replica: Position, waits: bool, limit: int | None) -> tuple[str, str, str]:
    """Return what a replica does, in the singular and in the plural, and where."""
    steps = replica.steps
    if replica.has_returned:
        count = "" if steps is None else f" after {steps} step{'' if steps == 1 else 's'}"
        return "returned", "returned", count
    step = "" if steps is None else f" in step {min(steps, steps if limit is None else limit) + 1}"
    where = f"{step} at {replica.line}" if replica.line else f"{step}, at the end of its function"
    return ("waits", "wait", where) if waits else ("is", "are", where)


def named(ordinals: Iterable[int]) -> str:
    """Return ``replica 3``, ``replicas 0, 1`` or ``replicas 0-7``."""
    numbers = sorted(ordinals)
    if len(numbers) == 1:
        return f"replica {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"replicas {numbers[0]}-{numbers[-1]}"
    return f"replicas {', '.join(map(str, numbers))}"
