"""Sees that a replica waits in vain for others, and says where everybody is."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from polyxla_bridge.env import POLYXLA_STALL_TIMEOUT_S

if TYPE_CHECKING:
    from polyxla_bridge.engine.engine import Engine, Position
    from polyxla_bridge.programs.compile_coordination import Board

STALLED = 5
"""Exit code of a process whose replicas waited in vain."""
OWN_THREADS = ("polyxla-device", "polyxla-read", "polyxla-buffers", "polyxla-watch", "polyxla-parent")
"""How the names of threads begin that nobody needs to see: the engine's, and a launcher's."""
TICK_S = 1.0
"""How often the watch looks, in seconds."""

Handler = Callable[[str], None]


def _end(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    # Nothing else ends a thread that waits inside a collective.
    os._exit(STALLED)


_handlers: list[Handler] = [_end]


def on_stall(handler: Handler) -> None:
    """Choose what is done when a replica has waited too long; it is given the text that tells where all are.

    Without it, the text goes to standard error and the process ends with exit code `STALLED`.
    """
    _handlers[:] = [handler]


def describe(engine: Engine) -> str:
    """Return what this process's replicas do, and where each of its threads is."""
    lines = [f"process {engine.process_index} (pid {os.getpid()}):"]
    lines += [f"  {position}" for position in engine.positions()]
    return "\n".join([*lines, stacks()])


def describe_here() -> str:
    """Return the same of the engine that is watched in this process, if one is."""
    return describe(_watched[0]) if _watched else stacks()


def stacks() -> str:
    """Return the Python stack of every thread of this process, but for the engine's own."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():  # noqa: SLF001  (there is no other way)
        name = names.get(ident, "unknown")
        if not name.startswith(OWN_THREADS):
            lines.append(f"thread {name}:")
            lines += "".join(traceback.format_stack(frame)).rstrip().splitlines()
    return "\n".join(lines)


_watched: list[Engine] = []


class Watch:
    """A thread that looks after the replicas of a process.

    Only programs with collectives wait for others. That one waits is no stall while any process shows
    that it compiles, or computes: then the others have reason to wait.

    Args:
        engine: whose positions are watched.
        board: where processes show that they are at work.
        compiling: tells whether this process compiles.
        timeout_s: how long a replica may wait.
    """

    def __init__(self, engine: Engine, board: Board, compiling: Callable[[], bool], timeout_s: float) -> None:
        self._engine = engine
        self._board = board
        self._compiling = compiling
        self._timeout_s = timeout_s
        self._tick_s = min(TICK_S, timeout_s / 4)
        self._signs: dict[str, str] = {}
        self._worked = time.monotonic()
        self._stop = threading.Event()
        _watched.append(engine)
        self._thread = threading.Thread(target=self._look, name="polyxla-watch", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(self._tick_s):
            positions = self._engine.positions()
            try:
                stalled = self._stalled(positions)
            except Exception:
                # The store went away with process 0, which jaxlib notices in its own way.
                return
            if stalled:
                _handlers[0](f"{self._told(stalled)}\n{describe(self._engine)}")
                return

    def _stalled(self, positions: list[Position]) -> list[Position]:
        lasting = [one for one in positions if one.program is not None and one.seconds > self._tick_s]
        # Whose programs are short is hardly ever seen in one, but has always just begun or ended something.
        moved = any(one.seconds < self._tick_s for one in positions)
        if self._compiling() or moved or any(not one.collectives for one in lasting):
            self._board.sign()
        waiting = [one for one in lasting if one.collectives]
        if waiting and (signs := self._board.signs()) != self._signs:
            self._signs, self._worked = signs, time.monotonic()
        quiet_s = time.monotonic() - self._worked
        return [one for one in waiting if min(one.seconds, quiet_s) > self._timeout_s]

    def _told(self, stalled: list[Position]) -> str:
        waits = "; ".join(str(one) for one in stalled)
        return (
            f"polyxla: a replica waits in vain for others to join its collectives ({waits}). Another replica "
            "runs other programs, by a condition that is not the same on all of them, or it has ended or "
            f"hangs. Below is where this process's replicas are. {POLYXLA_STALL_TIMEOUT_S}="
            f"{self._timeout_s:g} is how long they may wait, in seconds."
        )

    def close(self) -> None:
        """Stop looking."""
        self._stop.set()
        if self._engine in _watched:
            _watched.remove(self._engine)
        if self._thread is not threading.current_thread():
            self._thread.join(self._tick_s + 1)
