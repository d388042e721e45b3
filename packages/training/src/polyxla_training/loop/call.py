"""The call that a Trainer sends to its replicas, and the outcome that each returns. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from polyxla.plugin import World
    from polyxla_training.options import FitOptions


Stage = Literal["fit", "validate", "test", "predict"]
"""The methods of a Trainer."""


@dataclass(frozen=True)
class TrainerCall:
    """One call of a method of the Trainer.

    Attributes:
        stage: which method.
        module: the caller's module, or this process's copy of it.
        loaders: the loaders that were passed, each None if it was not: training and validation, or one.
        datamodule: the data module that was passed, or None.
        options: the Trainer's options.
        caller_pid: id of the process that called the Trainer.
    """

    stage: Stage
    module: Any
    loaders: tuple[Iterable[Any] | None, ...]
    datamodule: Any
    options: FitOptions
    caller_pid: int

    @property
    def is_callers_process(self) -> bool:
        """Whether this is the process that called the Trainer."""
        return os.getpid() == self.caller_pid

    def trains_callers_module(self, world: World) -> bool:
        """Return whether this replica works on the caller's own module, not on a copy."""
        # A module that is divided, or that several threads would train, is a copy.
        return self.is_callers_process and not world.shares_process and self.options.mesh is None

    def returns_state(self, world: World) -> bool:
        """Return whether this is the one replica whose parameters the calling process receives.

        Not ordinal 0: on a pod every host has a caller, and only one host has ordinal 0. A process that
        torchrun started receives the results of its own replicas only.
        """
        # A launch on a host returns to that host's caller, which needs the parameters once.
        is_first_of_caller = world.local_ordinal == 0 or (self.is_callers_process and world.owns_process)
        return is_first_of_caller and not self.trains_callers_module(world)


@dataclass(frozen=True)
class TrainerOutcome:
    """The result of a run, as a replica returns it.

    Attributes:
        metrics: means over all replicas' records, by name.
        epochs: number of finished passes over the training data.
        steps: number of optimizer updates.
        runtime: name of the runtime.
        device: the runtime's name for the device.
        world_size: number of replicas.
        state: the trained parameters on the host, from one replica for each process that called the Trainer;
            None from the others, and if the caller's own module was trained.
        stopped: why training ended early; empty if it did not.
        predictions: what ``predict_step`` returned for each batch of this replica, on the host;
            in the Trainer those of all replicas, in order.
        data_ordinal: number of this replica among those that receive different records.
    """

    metrics: dict[str, float]
    epochs: int
    steps: int
    runtime: str
    device: str
    world_size: int
    state: dict[str, Any] | None = field(default=None, repr=False)
    stopped: str = ""
    predictions: list[Any] = field(default_factory=list, repr=False)
    data_ordinal: int = 0


def merge_predictions(outcomes: Iterable[TrainerOutcome]) -> list[Any]:
    """Return all predictions in order; the batches were divided round-robin."""
    # Replicas that divide a module among them compute the same predictions.
    parts = {outcome.data_ordinal: outcome.predictions for outcome in outcomes}
    # Replicas may differ by one batch, when their number does not divide that of the batches.
    rounds = zip_longest(*(parts[ordinal] for ordinal in sorted(parts)), fillvalue=_NONE)
    return [batch for batches in rounds for batch in batches if batch is not _NONE]


_NONE = object()
