"""The device's own profile of some steps of a training, for TensorBoard and Perfetto."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from polyxla.console import say
from polyxla.hookspecs import hookimpl

if TYPE_CHECKING:
    from polyxla.replica.replica import Replica

FOLDER = "profile"
"""Of the run's folder."""


class Profile:
    """A listener that traces the steps from `first` to `last`.

    Args:
        steps: the numbers of the first and the last.
        log_dir: the run's directory; the trace goes into its subdirectory `FOLDER`.
    """

    def __init__(self, steps: tuple[int, int], log_dir: str) -> None:
        self._first, self._last = steps
        self._folder = str(Path(log_dir) / FOLDER)
        self._tracing = ExitStack()
        self._is_tracing = False

    @hookimpl
    def polyxla_step_finished(self, replica: Replica, step: int) -> None:
        """Begin after the step before the first, end with the last."""
        if step == self._last and self._is_tracing:
            # What was handed over is part of the profile.
            replica.sync(wait=True)
            self._end()
        if step == self._first - 1:
            replica.sync(wait=True)
            self._tracing.enter_context(replica.profile(self._folder))
            self._is_tracing = True

    def _end(self) -> None:
        self._is_tracing = False
        self._tracing.close()
        say(f"steps {self._first} to {self._last} are profiled: tensorboard --logdir {self._folder}")

    @hookimpl
    def polyxla_replica_stopped(self) -> None:
        """Write what there is, where training ended before the last step."""
        if self._is_tracing:
            self._end()
