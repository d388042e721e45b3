"""Equal lines of several hosts become one, and of their tracebacks only the first real one is shown."""

from __future__ import annotations

import bisect
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

WINDOW_S = 0.4
"""How long a line waits for the other hosts to print it too, in seconds."""
HOLD_S = 3.0
"""How long a traceback, and what follows it, is held back, in seconds; then it is shown like other lines."""
EXPLAINS_S = 10.0
"""How long after a traceback was shown it still explains its host's failure, in seconds."""
_BEGINS = "Traceback (most recent call last):"
_ERROR = re.compile(r"(?:[a-z_]\w*\.)*_*[A-Z]\w*(?::|$)")
_CONSEQUENCES = ("ReplicaLostError", "StalledError", "KeyboardInterrupt")
"""Errors that polyxla raises on one host because of what happens on another, or because of a signal."""


@dataclass
class FoldedLine:
    """A line and the hosts that printed it.

    Attributes:
        stream: ``out``, ``err`` or ``worker``.
        text: the line, without its end.
        since_s: when the first of them printed it.
        hosts: their numbers, in order of arrival.
    """

    stream: str
    text: str
    since_s: float = 0.0
    hosts: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return f"[{host_range(self.hosts)}] {self.text}"


class Folder:
    """Collects lines; returns each once all hosts have printed it, or after the longest wait.

    The lines of each host and stream stay in their order.

    Args:
        host_count: number of hosts.
        window_s: longest wait, in seconds.
    """

    def __init__(self, host_count: int, window_s: float = WINDOW_S) -> None:
        self._host_count, self._window_s = host_count, window_s
        self._waiting: deque[FoldedLine] = deque()
        self._first = 0
        # The ascending numbers of the waiting lines with a text, and the number of each host's last line.
        self._same: dict[tuple[str, str], list[int]] = {}
        self._last: dict[tuple[int, str], int] = {}

    def add(self, host: int, stream: str, text: str, now_s: float) -> None:
        """Add a line that a host printed."""
        same = self._same.setdefault((stream, text), [])
        # A host's lines keep their order, so its line joins only a line after its previous one.
        last = self._last.get((host, stream), -1)
        if (place := bisect.bisect_right(same, last)) < len(same):
            number = same[place]
        else:
            number = self._first + len(self._waiting)
            same.append(number)
            self._waiting.append(FoldedLine(stream, text, now_s))
        self._waiting[number - self._first].hosts.append(host)
        self._last[host, stream] = number

    def take(self, now_s: float, *, everything: bool = False) -> list[FoldedLine]:
        """Return the lines that need not wait any longer, in order."""
        taken = []
        # A complete line waits for those before it, so that the lines of a host keep their order.
        while self._waiting and (everything or self._is_due(self._waiting[0], now_s)):
            line = self._waiting.popleft()
            same = self._same[line.stream, line.text]
            # The first waiting line has the lowest number, so this removes the first element.
            same.remove(self._first)
            if not same:
                del self._same[line.stream, line.text]
            self._first += 1
            taken.append(line)
        return taken

    def _is_due(self, line: FoldedLine, now_s: float) -> bool:
        return len(line.hosts) == self._host_count or now_s - line.since_s >= self._window_s


def host_range(hosts: Iterable[int]) -> str:
    """Return host numbers in short, such as ``w0-w3,w7``."""
    parts: list[list[int]] = []
    for host in sorted(set(hosts)):
        if parts and host == parts[-1][-1] + 1:
            parts[-1].append(host)
        else:
            parts.append([host])
    return ",".join(f"w{part[0]}" if len(part) == 1 else f"w{part[0]}-w{part[-1]}" for part in parts)


@dataclass
class HeldTraceback:
    """What a host printed on standard error from the beginning of a traceback on.

    Attributes:
        host: the host's number.
        since_s: when it printed the first line.
        was_shown: whether the lines were shown because the host went on for `HOLD_S`.
        lines: the lines.
    """

    host: int
    since_s: float
    was_shown: bool = False
    lines: list[str] = field(default_factory=list)

    @property
    def error(self) -> str:
        """The line that names the exception: the last one that is not indented and looks like it."""
        # Notes follow the exception's line, so the last line alone is not enough.
        return next((line for line in reversed(self.lines) if _ERROR.match(line)), self.lines[-1])

    @property
    def without_notes(self) -> list[str]:
        """The lines without the notes at the end, which name the host and the replica."""
        return self.lines[: self.lines.index(self.error) + 1]

    @property
    def is_consequence(self) -> bool:
        """Whether another host's failure explains it."""
        return self.error.partition(":")[0].rpartition(".")[2] in _CONSEQUENCES


class Tracebacks:
    """The tracebacks of all hosts."""

    def __init__(self) -> None:
        self._held: dict[int, HeldTraceback] = {}
        self._released: dict[int, HeldTraceback] = {}
        self._last: list[HeldTraceback] = []

    def holds(self, host: int, stream: str, text: str, now_s: float) -> bool:
        """Keep a line if it belongs to a traceback; return whether it does."""
        if stream != "err":
            return False
        # A process that passes a traceback on may indent it or put a bar before it.
        if host not in self._held and not text.lstrip(" |").startswith(_BEGINS):
            return False
        self._held.setdefault(host, HeldTraceback(host, now_s)).lines.append(text)
        return True

    def release(self, now_s: float) -> list[HeldTraceback]:
        """Return the tracebacks of hosts that went on, to be shown like other lines."""
        # A host that survives its traceback prints on, and must not have its lines held for ever.
        due = [held for held in self._held.values() if now_s - held.since_s >= HOLD_S]
        for held in due:
            held.was_shown = True
            self._released[held.host] = self._held.pop(held.host)
        return due

    def end(self, host: int, now_s: float, *, failed: bool) -> HeldTraceback | None:
        """Take note of a host's end; return its traceback, to be shown, if the host has not failed."""
        held, released = self._held.pop(host, None), self._released.pop(host, None)
        if not failed:
            return held
        # A program may print its traceback, and take seconds to end, such as in an atexit function.
        if held is None and released and now_s - released.since_s < HOLD_S + EXPLAINS_S:
            held = released
        if held:
            self._last.append(held)
        return None

    def is_consequence(self, host: int) -> bool:
        """Return whether another host's failure explains the traceback of a host that failed."""
        return any(held.is_consequence for held in self._last if held.host == host)

    def first(self) -> tuple[HeldTraceback, list[int]] | None:
        """Return the first real traceback of the hosts that failed, and all hosts with the same.

        None if there is none, or if it was shown.
        """
        # The sort is stable: real errors come first, in the order in which their hosts ended.
        ranked = sorted(self._last, key=lambda held: held.is_consequence)
        # If it was shown when it arrived, a second copy would hide the failure.
        if not ranked or ranked[0].was_shown:
            return None
        return ranked[0], [held.host for held in ranked if held.without_notes == ranked[0].without_notes]
