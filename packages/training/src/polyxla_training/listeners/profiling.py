"""The listener that profiles some steps on the device, for TensorBoard and Perfetto."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from polyxla import hookimpl
from polyxla.plugin import say
from polyxla_training.observe.run_log import Expendable

if TYPE_CHECKING:
    from polyxla import Replica

PROFILE_DIR = "profile"
"""Subdirectory of the run."""


class ProfileListener:
    """Profiles the steps from the first to the last.

    Args:
        replica: the replica that trains.
        steps: the numbers of the first and the last step.
        log_dir: the run's directory; the profile goes into its subdirectory `PROFILE_DIR`.
    """

    def __init__(self, replica: Replica, steps: tuple[int, int], log_dir: str) -> None:
        self._first, self._last = steps
        self._directory = str(Path(log_dir) / PROFILE_DIR)
        self._log = Expendable(f"the profile in {self._directory}")
        self._profile = ExitStack()
        self._begin_step: Callable[[int], None] | None = None
        if replica.steps == self._first - 1:
            self._begin(replica)

    @hookimpl
    def polyxla_step_finished(self, replica: Replica, step: int) -> None:
        """Start after the step before the first; stop after the last."""
        if step == self._last and self._begin_step:
            # Steps that the device has not finished yet belong to the profile too.
            replica.sync(wait=True)
            self._end()
        if step == self._first - 1:
            self._begin(replica)
        elif self._begin_step:
            self._begin_step(step + 1)

    def _begin(self, replica: Replica) -> None:
        # Earlier steps do not belong to the profile, so the device must have finished them.
        replica.sync(wait=True)
        with self._log.attempt():
            self._begin_step = self._profile.enter_context(replica.profile(self._directory))
            self._begin_step(self._first)

    def _end(self) -> None:
        self._begin_step = None
        with self._log.attempt():
            self._profile.close()
            say(f"profiled steps {self._first} to {self._last}: tensorboard --logdir {self._directory}")

    @hookimpl
    def polyxla_replica_stopped(self) -> None:
        """Write the profile if training ended before the last step."""
        if self._begin_step:
            self._end()
