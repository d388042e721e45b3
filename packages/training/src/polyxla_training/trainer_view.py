"""`TrainerView`: what a LightningModule sees as ``self.trainer``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from polyxla.replica.replica import Replica


@dataclass
class TrainerView:
    """The progress of training, under Lightning's names. The module is copied and pickled with it.

    Attributes:
        current_epoch: number of finished epochs.
        global_step: number of optimizer updates so far.
        max_epochs: number of passes over the training data.
        world_size: number of replicas.
        is_global_zero: whether this is ordinal 0.
        global_rank: the ordinal.
        local_rank: the local ordinal.
        estimated_stepping_batches: optimizer updates that training will make; inf if unknown.
        logger: None; logged values go to the listeners.
        progress_bar_callback: None; ``self.print`` of a LightningModule prints plainly.
    """

    current_epoch: int
    global_step: int
    max_epochs: int
    world_size: int
    is_global_zero: bool
    global_rank: int = 0
    local_rank: int = 0
    estimated_stepping_batches: float = float("inf")
    logger: None = None
    progress_bar_callback: None = None

    @classmethod
    def at_start(cls, replica: Replica, max_epochs: int) -> Self:
        """Return the view of a training that begins in `replica`."""
        world = replica.world
        return cls(0, 0, max_epochs, world.world_size, replica.is_first, world.ordinal, world.local_ordinal)
