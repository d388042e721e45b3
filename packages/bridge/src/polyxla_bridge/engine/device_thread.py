"""A device's thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from polyxla_bridge.engine.engine import Position
from polyxla_bridge.engine.futures import complete


class Stream:
    """Runs what is queued for one device, in order, on a thread of its own.

    Args:
        device: the device's number.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        # One tuple, replaced as a whole: others read it without a lock.
        self._at: tuple[str | None, tuple[str, ...], float] = (None, (), time.monotonic())
        self._thread = threading.Thread(target=self._work, name=f"polyxla-device-{device}", daemon=True)
        self._thread.start()

    def put(self, done: Future[Any], task: Callable[[], Any]) -> None:
        """Queue a task whose result, or error, completes `done`."""
        self._tasks.put((done, task))

    def run(self, task: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queue a call and promise its result."""
        done: Future[Any] = Future()
        self.put(done, lambda: task(*arguments))
        return done

    def enter(self, program: str, collectives: tuple[str, ...]) -> None:
        """Say what the device begins to run; called by the task that runs it."""
        self._at = (program, collectives, time.monotonic())

    @property
    def position(self) -> Position:
        """What the device does now."""
        program, collectives, since = self._at
        return Position(self._device, program, collectives, time.monotonic() - since)

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            done, task = item
            complete(done, task)
            if self._at[0] is not None:
                self._at = (None, (), time.monotonic())
            # Or this frame would keep the last results alive until the next task.
            del item, done, task

    def close(self, timeout_s: float) -> None:
        """End after what was queued, waiting at most `timeout_s` seconds for it."""
        self._tasks.put(None)
        self._thread.join(timeout_s)
