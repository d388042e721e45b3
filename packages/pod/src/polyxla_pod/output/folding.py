"""Folding: lines that several hosts print become one line with all their numbers."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

WINDOW_S = 0.4
"""How long a line waits for the other hosts to print it too, in seconds."""


@dataclass
class FoldedLine:
    """A line and the hosts that printed it.

    Attributes:
        stream: ``out``, ``err`` or ``worker``.
        text: the line, without its end.
        since_s: when the first of them printed it.
        hosts: their numbers, in the order in which they came.
    """

    stream: str
    text: str
    since_s: float = 0.0
    hosts: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return f"[{host_range(self.hosts)}] {self.text}"


class Folder:
    """Collects lines, and returns each once all hosts have printed it, or once it has waited long enough.

    The lines of each host and stream stay in their order.

    Args:
        host_count: number of hosts.
        window_s: longest wait, in seconds.
    """

    def __init__(self, host_count: int, window_s: float = WINDOW_S) -> None:
        self._host_count, self._window_s = host_count, window_s
        self._waiting: deque[FoldedLine] = deque()
        self._first = 0
        # The numbers of the waiting lines with the same text, ascending, and of each host's last line.
        self._same: dict[tuple[str, str], list[int]] = {}
        self._last: dict[tuple[int, str], int] = {}

    def add(self, host: int, stream: str, text: str, now_s: float) -> None:
        """Add a line that a host printed."""
        same = self._same.setdefault((stream, text), [])
        # Only after the host's last line, or its lines would change places.
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
        while self._waiting and (everything or self._is_due(self._waiting[0], now_s)):
            line = self._waiting.popleft()
            same = self._same[line.stream, line.text]
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
