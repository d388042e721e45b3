"""What saves a Trainer's state: every so many steps, at the end of an epoch, and when told to end."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING

from polyxla.console import say
from polyxla.hookspecs import hookimpl
from polyxla_training.checkpoint.background_writer import Writer
from polyxla_training.checkpoint.folder import CheckpointFolder
from polyxla_training.checkpoint.stop_signal import StopSignal
from polyxla_training.stop_request import STOP_FILE

if TYPE_CHECKING:
    from polyxla.replica.replica import Replica
    from polyxla_training.fit import Fit

AGREE_EVERY_S = 2.0
"""How long replicas train on, about, before they agree whether one of them was told to end, in seconds. A
preempted machine has 30 s or more. Source: Google Cloud's documentation of preemptible and spot VMs."""


class Saver:
    """A listener in every replica; ordinal 0 writes, in the background.

    Args:
        replica: whose training.
        fit: the training.
        folder: where checkpoints go.
    """

    def __init__(self, replica: Replica, fit: Fit, folder: str) -> None:
        self._fit = fit
        self._every = fit.settings.save_every_n_steps
        self._folder = CheckpointFolder(folder, fit.settings.keep)
        self._writer = Writer()
        self._stop_file = Path(folder) / STOP_FILE
        self._stop = StopSignal()
        self._stop.__enter__()
        self._saved_step = self._agree_at = replica.steps
        self._agreed_s = time.monotonic()

    @hookimpl
    def polyxla_step_finished(self, replica: Replica, step: int) -> None:
        """Save every so many steps; stop where a replica was told to."""
        if self._every is not None and step % self._every == 0:
            self._save(replica)
        if step >= self._agree_at and self._is_told_to_stop(replica, step):
            self._fit.stop("SIGTERM")

    def _is_told_to_stop(self, replica: Replica, step: int) -> bool:
        told = bool(self._stop) or self._stop_file.exists()
        if replica.world_size == 1:
            return told
        # By steps, since replicas meet in steps; as many as ordinal 0 made in the time.
        now = time.monotonic()
        pace = max(step - self._agree_at, 1) / max(now - self._agreed_s, 1e-3)
        answers = replica.all_gather((told, max(1, int(pace * AGREE_EVERY_S))))
        self._agreed_s = time.monotonic()
        self._agree_at = step + answers[0][1]
        return any(one for one, _ in answers)

    @hookimpl
    def polyxla_epoch_finished(self, replica: Replica) -> None:
        """Save what an epoch and its validation left."""
        self._save(replica)

    @hookimpl
    def polyxla_fit_finished(self, replica: Replica) -> None:
        """Save the last step, where nothing has."""
        if self._saved_step != replica.steps:
            self._save(replica)
        self._writer.close()

    def _save(self, replica: Replica) -> None:
        # In every replica: their random numbers are part of it.
        state = self._fit.state_dict()
        self._saved_step = replica.steps
        if replica.is_first:
            self._writer.submit(functools.partial(self._folder.save, replica.steps), state)

    @hookimpl
    def polyxla_replica_stopped(self, error: BaseException | None) -> None:
        """Let the last write end, and signals mean what they meant."""
        self._stop.__exit__()
        try:
            self._writer.close()
        except Exception as failure:
            if error is None:
                raise
            say(f"the last checkpoint was not written: {failure}")
