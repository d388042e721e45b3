"""The thread that runs a device's work in order."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from polyxla_bridge.engine.engine import DeviceActivity
from polyxla_bridge.engine.futures import Outcome, complete

_Running = tuple[str | None, tuple[str, ...], frozenset[frozenset[int]], float]
"""The running program, its collectives, the groups that meet in them, and the time of its start."""


class DeviceThread:
    """Runs the tasks queued for one device, in order, on one thread.

    Args:
        device: index of the device.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._tasks: queue.SimpleQueue[tuple[Outcome, Callable[[], Any]] | None] = queue.SimpleQueue()
        # The tuple is replaced as a whole, because other threads read it without a lock.
        self._running: _Running = (None, (), frozenset(), time.monotonic())
        # A thread that waits in a collective cannot be ended, so it must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"polyxla-device-{device}", daemon=True)
        self._thread.start()

    def put(self, done: Outcome, task: Callable[[], Any]) -> None:
        """Queue a task; its result or error completes `done`."""
        self._tasks.put((done, task))

    def run(self, task: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queue a call, and return the future of its result."""
        done: Future[Any] = Future()
        self.put(done, lambda: task(*arguments))
        return done

    def enter(
        self, program: str, collectives: tuple[str, ...], groups: frozenset[frozenset[int]] = frozenset()
    ) -> None:
        """Record the program that starts now; the task that runs it calls this, on the device's thread."""
        self._running = (program, collectives, groups, time.monotonic())

    @property
    def activity(self) -> DeviceActivity:
        """What the device is doing now."""
        program, collectives, groups, since = self._running
        return DeviceActivity(self._device, program, collectives, time.monotonic() - since, groups)

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            done, task = item
            complete(done, task)
            if self._running[0] is not None:
                self._running = (None, (), frozenset(), time.monotonic())
            # While the thread waits for the next task, its frame must not keep the last results alive.
            del item, done, task

    def close(self, timeout_s: float) -> None:
        """Run what is queued, then end; wait for the thread at most `timeout_s` seconds."""
        self._tasks.put(None)
        self._thread.join(timeout_s)
