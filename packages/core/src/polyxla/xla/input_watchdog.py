"""Sees that a loop waits for its next batch in vain."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable

from polyxla import env
from polyxla.console import say
from polyxla.errors import StalledError

TELL_AFTER_S = 60.0
"""How long a wait is before it is told of, in seconds, where the deadline is not near already."""
TICK_S = 1.0
"""How often the watch looks, in seconds."""


class Patience:
    """A thread that watches how long a replica waits for a batch.

    The replica says when it begins to wait and when it has its batch, which costs it no lock.

    Args:
        timeout_s: the longest wait, in seconds.
        where: returns the line where the loader is; None where it is in none of the person's.
        give_up: lets the replica wait no longer; called in the watch's thread, once.

    Attributes:
        error: what the replica must raise; None while there is nothing wrong.
    """

    def __init__(
        self, timeout_s: float, where: Callable[[], str | None], give_up: Callable[[], None]
    ) -> None:
        self.error: StalledError | None = None
        self._timeout_s, self._where, self._give_up = timeout_s, where, give_up
        self._since: float | None = None
        self._told: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="polyxla-input", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Say that the replica waits."""
        self._since = time.monotonic()

    def end(self) -> None:
        """Say that it waits no longer."""
        self._since = None

    def close(self) -> None:
        """Look no longer."""
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(min(TICK_S, self._timeout_s / 4)):
            since = self._since
            waited_s = time.monotonic() - since if since is not None else 0.0
            if waited_s > self._timeout_s:
                self.error = StalledError(
                    f"no batch arrived in {self._timeout_s:g} s: {self._account()}. "
                    f"{env.POLYXLA_INPUT_TIMEOUT_S} sets the limit."
                )
                self._give_up()
                return
            if waited_s > min(TELL_AFTER_S, self._timeout_s / 2) and self._told != since:
                self._told = since
                say(
                    f"no batch for {waited_s:.0f} s: {self._account()}. After {self._timeout_s:g} s it is an "
                    f"error ({env.POLYXLA_INPUT_TIMEOUT_S})"
                )

    def _account(self) -> str:
        if line := self._where():
            return f"the loader is at {line}"
        if workers := [str(one.pid) for one in multiprocessing.active_children()]:
            # Their stacks are not to be had from here.
            return f"it waits for the loader's workers (processes {', '.join(workers)})"
        return "it is at no line of the program: torch reads it, or copies it to the device"
