"""`Sharding`: the contract between `polyxla.Replica` and the plugin that divides a module's parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from polyxla.contracts.world import World

if TYPE_CHECKING:
    import torch


class Sharding(ABC):
    """How the replicas divide the parameters of their modules. Used by the replica's thread only.

    Attributes:
        mesh: size of each dimension by its name.
        data_world: this replica's numbers among those that receive different records. Replicas that compute
            the same records together, as in tensor parallelism, have the same numbers.
    """

    mesh: Mapping[str, int]
    data_world: World

    @abstractmethod
    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> int:
        """Average those gradients of `optimizer`'s parameters that the backward pass has not averaged.

        Returns:
            How many parameters have no gradient in any replica, as far as that had to be found out.
        """

    @abstractmethod
    def clip(self, optimizer: torch.optim.Optimizer, norm: float | None, value: float | None) -> None:
        """Limit the norm of all gradients together, over all shards, and the size of their elements."""
