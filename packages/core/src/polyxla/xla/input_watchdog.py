"""Watchdog for a stalled input pipeline."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable

from polyxla import env
from polyxla.console import say
from polyxla.errors import StalledError

WARN_AFTER_S = 60.0
"""Wait after which a warning is printed, in seconds; half the timeout if that is shorter."""
TICK_S = 1.0
"""How often the watchdog looks, in seconds."""


class InputWatchdog:
    """A thread that monitors how long a replica waits for its next batch.

    The replica marks the start and the end of each wait, which takes no lock.

    Args:
        timeout_s: longest wait for a batch, in seconds.
        where: returns the user's line that the loader is executing; None if it executes none.
        cancel: ends the replica's wait; called once, in the watchdog's thread.

    Attributes:
        error: the error that the replica must raise; None unless a wait was too long.
    """

    def __init__(self, timeout_s: float, where: Callable[[], str | None], cancel: Callable[[], None]) -> None:
        self.error: StalledError | None = None
        self._timeout_s, self._where, self._cancel = timeout_s, where, cancel
        # Needs no lock: only the replica's thread writes it, and the watchdog reads it once per tick.
        self._since: float | None = None
        self._warned_of: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="polyxla-input", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Mark that the replica waits."""
        self._since = time.monotonic()

    def end(self) -> None:
        """Mark that the replica has its batch."""
        self._since = None

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(min(TICK_S, self._timeout_s / 4)):
            # Read once: the replica's thread may end the wait in between.
            since = self._since
            waited_s = time.monotonic() - since if since is not None else 0.0
            if waited_s > self._timeout_s:
                self.error = StalledError(
                    f"no batch arrived in {self._timeout_s:g} s: {self._cause()}. "
                    f"{env.POLYXLA_INPUT_TIMEOUT_S} sets the limit."
                )
                self._cancel()
                return
            if waited_s > min(WARN_AFTER_S, self._timeout_s / 2) and self._warned_of != since:
                self._warned_of = since
                say(
                    f"no batch for {waited_s:.0f} s: {self._cause()}. After {self._timeout_s:g} s this is an "
                    f"error ({env.POLYXLA_INPUT_TIMEOUT_S})"
                )

    def _cause(self) -> str:
        if line := self._where():
            return f"the loader is at {line}"
        if workers := [str(worker.pid) for worker in multiprocessing.active_children()]:
            # The stack of another process cannot be read from here.
            return f"it waits for the loader's workers (processes {', '.join(workers)})"
        return "no line of the program is running: torch reads the batch, or copies it to the device"
