"""What listeners of a training are told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from polyxla.replica.loader import Loader
    from polyxla_training.settings import FitSettings


@dataclass(frozen=True)
class Fit:
    """One call of `polyxla_training.Trainer.fit` in one replica.

    Attributes:
        settings: what the Trainer was told.
        module: what is trained, on the device.
        loader: gives the training batches.
        steps_per_epoch: optimizer updates of a whole epoch; None where the loader does not know its length.
        state_dict: returns the whole state of the training, as `polyxla_training.save` takes it. A collective; called
            between steps.
        stop: ends training after the step under way, for the reason it is given; called by every replica at
            the same step.
    """

    settings: FitSettings
    module: torch.nn.Module
    loader: Loader
    steps_per_epoch: int | None
    state_dict: Callable[[], dict[str, Any]]
    stop: Callable[[str], None]
