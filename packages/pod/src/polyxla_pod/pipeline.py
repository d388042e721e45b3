"""The way of a line: from a host, past held tracebacks and folding, to the screen and the job's log."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from polyxla_pod.folding import FoldedLine, Folder, HeldTraceback, Tracebacks
from polyxla_pod.messages import WORKER_STREAM

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|inf)"
_STEP = re.compile(r"\bsteps?\b\s*[=:#]?\s*(\d{1,18})(?![\d.]*\s*(?:s|ms|it)\b)", re.IGNORECASE)
_LOSS = re.compile(rf"\bloss\b\s*[=:]?\s*({_NUMBER})", re.IGNORECASE)
_RATE = re.compile(rf"({_NUMBER})\s*(?:steps|it)/s", re.IGNORECASE)
UNSHOWN_LINES = 50_000
"""How many lines may wait for a screen that is blocked; then the oldest are left out."""


@dataclass
class HostProgress:
    """The latest numbers of a host.

    Attributes:
        step: number of updates; None if no line said it.
        loss: the loss as it was printed.
        steps_per_s: as printed, or between the last two lines with a step.
        last_line: the last line.
    """

    step: int | None = None
    loss: str | None = None
    steps_per_s: float | None = None
    last_line: str = ""
    _step_s: float = 0.0

    def read(self, text: str, now_s: float) -> None:
        """Take the numbers in a line."""
        if text.strip():
            self.last_line = text
        if match := _LOSS.search(text):
            self.loss = match[1]
        if match := _STEP.search(text):
            self._advance(int(match[1]), now_s)
        # A logger divides by a time of zero, and JSON has no infinity.
        if (match := _RATE.search(text)) and math.isfinite(rate := float(match[1])):
            self.steps_per_s = rate

    def _advance(self, step: int, now_s: float) -> None:
        # A smaller step is the start of another run in the same program: its rate is unknown.
        if self.step is not None and step > self.step and now_s > self._step_s:
            self.steps_per_s = (step - self.step) / (now_s - self._step_s)
        if step != self.step:
            self.step, self._step_s = step, now_s


@dataclass
class HostState:
    """A host's state.

    Attributes:
        name: the transport's name for it.
        state: ``connecting``, ``checking``, ``copying``, ``starting its worker``, ``running``, ``ended`` or
            ``failed``.
        progress: the numbers in its lines.
    """

    name: str
    state: str = "connecting"
    progress: HostProgress = field(default_factory=HostProgress)

    def as_json(self) -> dict[str, Any]:
        """Return the state as JSON-compatible values."""
        progress = self.progress
        numbers = {"step": progress.step, "loss": progress.loss, "steps_per_s": progress.steps_per_s}
        return {"name": self.name, "state": self.state, **numbers, "last_line": progress.last_line}


class Screen(Protocol):
    """Shows the hosts' lines."""

    def show(self, line: FoldedLine) -> None:
        """Show one line."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class Log(Protocol):
    """Keeps the lines of a job."""

    def add(self, line: FoldedLine) -> None:
        """Keep a line."""

    def tick(self) -> None:
        """Make the kept lines visible to other processes, if it is time."""


class Pipeline:
    """The output of one start of a job.

    `show` may run in another thread than the rest. A paused terminal or a pager blocks it, and must not block
    the launcher's event loop: hosts without heartbeats end the command.

    Args:
        states: the hosts; their progress is read from their lines.
        screen: shows the lines.
        log: keeps every line that a host printed, including those that are not shown.
    """

    def __init__(self, states: Sequence[HostState], screen: Screen, log: Log) -> None:
        self._states, self._screen, self._log = states, screen, log
        self._folder = Folder(len(states))
        self._tracebacks = Tracebacks()
        self._due: deque[FoldedLine] = deque()
        self._lost_count = 0
        self._showing = threading.Lock()

    def add(self, host: int, stream: str, text: str) -> None:
        """Receive a line. The lines of workers go only to the log."""
        now = time.monotonic()
        if stream == WORKER_STREAM:
            self._log.add(FoldedLine(stream, text, now, [host]))
            return
        self._states[host].progress.read(text, now)
        if self._tracebacks.holds(host, stream, text, now):
            self._log.add(FoldedLine(stream, text, now, [host]))
        else:
            self._folder.add(host, stream, text, now)

    def end(self, host: int, *, failed: bool) -> None:
        """Receive a host's end."""
        if held := self._tracebacks.end(host, time.monotonic(), failed=failed):
            self._pass_on(held, [host])

    def is_consequence(self, host: int) -> bool:
        """Return whether another host's failure explains the failure of this one."""
        return self._tracebacks.is_consequence(host)

    def tick(self) -> None:
        """Log what is due, and have it shown."""
        now = time.monotonic()
        self._log.tick()
        for held in self._tracebacks.release(now):
            self._pass_on(held, [held.host])
        for line in self._folder.take(now):
            self._show(line)

    def flush(self, *, traceback: bool = False) -> None:
        """Have all waiting lines shown, then the first real traceback, if that is wanted."""
        for line in self._folder.take(time.monotonic(), everything=True):
            self._show(line)
        if traceback and (first := self._tracebacks.first()):
            self._pass_on(*first)

    def show(self) -> None:
        """Show what is due. Blocks as long as the screen does.

        Raises:
            OSError: the screen is gone.
        """
        # The launcher's event loop and `_tell` may both have a thread here: lines must not change places.
        with self._showing:
            while self._due:
                if self._lost_count:
                    text = f"{self._lost_count} lines are not shown; the job's log has them"
                    self._lost_count = 0
                    self._screen.show(FoldedLine("err", text, hosts=list(range(len(self._states)))))
                self._screen.show(self._due.popleft())

    def _show(self, line: FoldedLine) -> None:
        self._log.add(line)
        self._add_due(line)

    def _add_due(self, line: FoldedLine) -> None:
        # The oldest lines go first, because the newest explain a failure.
        if len(self._due) >= UNSHOWN_LINES:
            self._due.popleft()
            self._lost_count += 1
        self._due.append(line)

    def _pass_on(self, held: HeldTraceback, hosts: list[int]) -> None:
        # The log already has these lines: `add` has logged each when the host printed it.
        for text in held.lines:
            self._add_due(FoldedLine("err", text, held.since_s, hosts))
