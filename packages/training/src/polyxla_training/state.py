"""The whole state of a training: what a checkpoint holds, and how a run resumes from one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from polyxla.console import say
from polyxla.errors import UsageError
from polyxla.replica import random_state
from polyxla.replica.loader import Loader
from polyxla.replica.replica import Replica
from polyxla_training.checkpoint import CheckpointError, check_state
from polyxla_training.metrics import MetricAccumulator
from polyxla_training.module_adapter import Schedulers
from polyxla_training.resume import load_same
from polyxla_training.trainer_view import TrainerView

FORMAT = 1
"""Version of `TrainingState.state_dict`; checkpoints of other versions are refused."""


@dataclass(frozen=True)
class TrainingState:
    """Everything that the rest of one replica's training depends on.

    Attributes:
        replica: its update count and random numbers.
        module: its parameters and buffers, on the device.
        optimizer: as ``configure_optimizers`` returned it.
        schedulers: the learning-rate schedules.
        loader: the position in the training data.
        metrics: the means over the current epoch.
        view: the number of finished epochs.
        seed: the seed that the Trainer was given.
    """

    replica: Replica
    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedulers: Schedulers
    loader: Loader
    metrics: MetricAccumulator
    view: TrainerView
    seed: int | None

    def state_dict(self) -> dict[str, Any]:
        """Return the state, the same in every replica.

        A collective; call it between two steps. Its tensors are those on the device: save or copy them before
        the next step.
        """
        own = {"rng": self.replica.rng_state(), "meter": self.metrics.state_dict()}
        return {
            "format": FORMAT,
            "world_size": self.replica.world_size,
            "precision": self.replica.precision.name,
            "epoch": self.view.current_epoch,
            "step": self.replica.steps,
            "seed": self.seed,
            "data": self.loader.state_dict(),
            "module": dict(self.module.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "schedules": self.schedulers.state_dict(),
            "replicas": self.replica.all_gather(own),
        }

    def resume(self, source: str | os.PathLike[str], checkpoint_dir: str | os.PathLike[str] | None) -> None:
        """Load a checkpoint. A collective.

        Args:
            source: path or URL of the checkpoint, or ``auto`` for the newest intact one in `checkpoint_dir`,
                if there is one.
            checkpoint_dir: directory of the checkpoints.

        Raises:
            UsageError: the checkpoint does not exist or does not fit, or replicas found different ones.
        """
        found = load_same(self.replica, os.fspath(source), checkpoint_dir)
        if found is None:
            return
        path, state = found
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            raise UsageError(
                f"{path} is not a checkpoint of a Trainer",
                where=f"resume={os.fspath(source)!r}",
                fix="Name one that a Trainer saved; polyxla_training.load reads any other.",
            )
        self.load_state_dict(state, str(path))
        if self.replica.is_first:
            say(f"resumed from {path}: epoch {state['epoch']}, step {state['step']}")

    def load_state_dict(self, state: Mapping[str, Any], where: str) -> None:
        """Continue from `state_dict`; the number of replicas may differ.

        Args:
            state: on the host.
            where: the file it was read from, for errors.

        Raises:
            UsageError: the module, its optimizer or its schedules differ from those that were saved.
        """
        check_state(self.module.state_dict(), state["module"], where=where)
        self.module.load_state_dict(state["module"])
        try:
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedulers.load_state_dict(state["schedules"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"the optimizer or its schedules do not fit: {error}",
                where=where,
                fix="Make configure_optimizers return what it returned when the checkpoint was written.",
            ) from error
        now = self.replica.precision.name
        if now != state["precision"] and self.replica.is_first:
            say(f"{where} was saved with precision {state['precision']}; training continues with {now}")
        self.view.current_epoch = state["epoch"]
        self.view.global_step = self.replica.steps = state["step"]
        self.loader.load_state_dict(state["data"])
        self._restore_own(state)

    def _restore_own(self, state: Mapping[str, Any]) -> None:
        ordinal, saved = self.replica.ordinal, state["replicas"]
        if len(saved) == self.replica.world_size:
            self.replica.restore_rng(saved[ordinal]["rng"])
            self.metrics.load_state_dict(saved[ordinal]["meter"])
            return
        # With another number of replicas, not each has a saved random state: all draw from new streams.
        self.replica.seed_everything(random_state.derive(state["seed"] or 0, "resumed", state["step"]))
        # Only one replica takes the totals of all, so that the epoch's mean counts them once.
        if ordinal == 0:
            self.metrics.load_state_dict(_sum_totals(one["meter"] for one in saved))


def _sum_totals(saved: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    sums: dict[str, tuple[float, float]] = {}
    for name, (total, weight) in itertools.chain.from_iterable(one.items() for one in saved):
        before = sums.get(name, (0.0, 0.0))
        sums[name] = (before[0] + total, before[1] + weight)
    return sums
