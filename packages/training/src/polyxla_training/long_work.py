"""Work that takes long in some replicas, while the others wait for it in short collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from polyxla.plugin import Collectives

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 10.0
"""Interval at which replicas ask whether all are done, in seconds; it doubles from the first to the longest.
Waiting in one collective until a long download ends would be reported as a stall."""

Result = TypeVar("Result")


def run_while_others_wait(replica: Collectives, function: Callable[[], Result]) -> Result:
    """Run `function` in a thread, and return its result once all replicas have run theirs. A collective.

    An error of `function` is raised at once, in this replica alone.
    """
    if replica.world_size == 1:
        return function()
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    # In a thread, so that this replica can take part in collectives.
    thread = threading.Thread(target=run, name="polyxla-long-work", daemon=True)
    thread.start()
    wait_s = FIRST_WAIT_S
    while True:
        # All replicas run this loop in step, because each round ends with a collective, however long the work
        # takes.
        thread.join(wait_s)
        is_running = thread.is_alive()
        # Raised although the others still wait: the launcher ends them when this replica fails.
        if errors:
            raise errors[0]
        if not any(replica.all_gather(is_running)):
            return results[0]
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
