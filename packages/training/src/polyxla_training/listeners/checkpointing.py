"""The listener that saves a Trainer's state: every n steps, after each epoch, and on SIGTERM."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyxla import hookimpl
from polyxla.plugin import say, tensors_in
from polyxla_training.checkpoint.api import BackgroundWriter
from polyxla_training.checkpoint.folder import CheckpointFolder
from polyxla_training.checkpoint.stop_signal import SIGNALLED, StopSignal, stop_file
from polyxla_training.checkpoint.tensors import is_divided
from polyxla_training.listeners.early_stopping import BestValue
from polyxla_training.long_work import run_while_others_wait

if TYPE_CHECKING:
    from polyxla import Replica
    from polyxla_training.options import Fit

AGREE_EVERY_S = 2.0
"""Approximate interval at which replicas agree whether to stop, in seconds. A preempted machine has 30 s or
more. Source: Google Cloud's documentation of preemptible and spot VMs."""
MOST_GROWTH = 4
"""By how much the number of steps between two agreements may grow at once."""


class CheckpointListener:
    """Runs in every replica. Ordinal 0 writes the files in the background, or each replica its shards.

    Args:
        replica: the replica that trains.
        fit: the training.
        directory: directory of the checkpoints.
    """

    def __init__(self, replica: Replica, fit: Fit, directory: str | os.PathLike[str]) -> None:
        self._fit = fit
        self._every = fit.options.save_every_n_steps
        name, mode = fit.options.monitor, fit.options.mode
        self._monitor = None if name is None else BestValue(name, mode, "Trainer(monitor=...)")
        self._is_best = False
        self._folder = CheckpointFolder(directory, fit.options.keep)
        self._writer = BackgroundWriter()
        self._stop_file = stop_file(directory)
        self._stop = StopSignal()
        # Not a with block: the listener's life is the replica's, and polyxla_replica_stopped ends it.
        self._stop.__enter__()
        # A run that resumes and makes no step has nothing to save.
        self._saved_step: int | None = replica.steps
        self._agree_at = self._agreed_step = replica.steps
        self._agreed_s = time.monotonic()

    @property
    def state_key(self) -> str:
        """Its name in checkpoints."""
        return "checkpoints"

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far, under the name of its metric, once the metric was there."""
        monitor = self._monitor
        return {monitor.name: monitor.best} if monitor is not None and monitor.is_seen else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`, unless another metric is monitored now."""
        if self._monitor is not None:
            self._monitor.best = state.get(self._monitor.name)
            self._monitor.is_seen = self._monitor.name in state

    @hookimpl
    def polyxla_metrics_ready(self, metrics: Mapping[str, float], hidden: Mapping[str, float]) -> None:
        """Decide whether the next checkpoint is the best."""
        found = {**metrics, **hidden}
        if self._monitor is not None and self._monitor.name in found:
            self._is_best = self._monitor.improves(found[self._monitor.name])

    @hookimpl
    def polyxla_validation_finished(self, replica: Replica) -> None:
        """Save the state that a validation within an epoch has found to be the best."""
        # A checkpoint that was saved at this step holds the state before the validation. A run that resumed
        # from it would validate again.
        self._saved_step = None
        if self._is_best:
            self._save(replica)

    @hookimpl
    def polyxla_step_finished(self, replica: Replica, step: int) -> None:
        """Save every n steps; stop if a replica received the request."""
        if self._every is not None and step % self._every == 0:
            self._save(replica)
        if step >= self._agree_at and self._must_stop(replica, step):
            self._fit.stop(SIGNALLED)

    def _must_stop(self, replica: Replica, step: int) -> bool:
        is_requested = bool(self._stop) or self._stop_file.exists()
        if replica.world_size == 1:
            return is_requested
        # All replicas must agree at the same step, or they would wait for each other in different
        # collectives. So the interval is a number of steps: as many as ordinal 0 makes in AGREE_EVERY_S, at
        # its speed since the last agreement. Both times are read before the exchange, which waits for the
        # steps that the device still has to make: between the two, it has made as many as were submitted.
        now, made = time.monotonic(), step - self._agreed_step
        steps = int(made / max(now - self._agreed_s, 1e-3) * AGREE_EVERY_S)
        # A few steps may take no time, because the device makes them later.
        answers = replica.all_gather((is_requested, min(max(steps, 1), made * MOST_GROWTH)))
        self._agreed_s, self._agreed_step = now, step
        self._agree_at = step + answers[0][1]
        return any(requested for requested, _ in answers)

    @hookimpl
    def polyxla_epoch_finished(self, replica: Replica, epoch: int) -> None:
        """Save the state after an epoch and its validation."""
        self._save(replica)
        if self._monitor is not None:
            self._monitor.check(epoch, self._fit.options.val_every_n_epochs)

    @hookimpl
    def polyxla_fit_finished(self, replica: Replica) -> None:
        """Save the last step, if it is not saved yet."""
        if self._saved_step != replica.steps or self._is_best:
            self._save(replica)
        run_while_others_wait(replica, self._writer.close)

    def _save(self, replica: Replica) -> None:
        # A write may take longer than the others may wait in one collective.
        run_while_others_wait(replica, self._writer.close)
        # A collective in every replica, because the state has the random numbers of all.
        state = self._fit.state_dict()
        self._saved_step = replica.steps
        # Divided tensors are written by all replicas, each its shards; otherwise ordinal 0 writes the file.
        if replica.is_first or any(map(is_divided, tensors_in(state))):
            save = functools.partial(self._folder.save, replica.steps, is_best=self._is_best)
            self._writer.submit(save, state)
        self._is_best = False

    @hookimpl
    def polyxla_replica_stopped(self, error: BaseException | None) -> None:
        """Wait for the last write, and restore the signal handlers."""
        self._stop.__exit__()
        try:
            self._writer.close()
        # The error that ended the replica is the one to raise.
        except Exception as failure:
            if error is None:
                raise
            say(f"the last checkpoint was not written: {failure}")
