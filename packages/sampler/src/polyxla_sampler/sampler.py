"""Samplers that divide a dataset among replicas, in an order that needs no memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from polyxla_sampler.permutation import around, derive_seed, order_of
from polyxla_sampler.resume import InTurn, State
from polyxla_sampler.round_robin import own_place


class ShardedSampler(InTurn, Sampler[int]):
    """One replica's records of every epoch, in place of `torch.utils.data.DistributedSampler`.

    It takes the same arguments and gives every replica as many records, but begins at once however long
    the dataset is, keeps no list of it, and can go on in the middle of an epoch.

    Args:
        dataset: what has a length, or the length itself.
        num_replicas: number of replicas; None asks torch.distributed.
        rank: this replica, ``0 <= rank < num_replicas``; None asks torch.distributed.
        shuffle: whether every epoch has an order of its own; else the records come in the dataset's.
        seed: the same in every replica; it says the orders.
        drop_last: leave the last records out where they do not go round, instead of repeating the first.

    Raises:
        ValueError: there is no such rank, or it is not given and torch.distributed is not initialised.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.num_replicas, self.rank = own_place(num_replicas, rank)
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.last = "drop" if drop_last else "repeat"

    def total(self) -> int:
        """Return the number of records."""
        return self.dataset if isinstance(self.dataset, int) else len(self.dataset)

    def identity(self) -> State:
        """Return the length and what the order depends on."""
        seed = self.seed if self.shuffle else None
        return {"length": self.total(), "shuffle": self.shuffle, "seed": seed}

    def __iter__(self) -> Iterator[int]:
        state = self.started()
        count = self.count(state)
        assert count is not None
        order = order_of(self.total(), self.shuffle, derive_seed(self.seed, state["epoch"]))
        places = range(state["position"] + self.rank, sys.maxsize, self.num_replicas)
        return around(order, places[:count])


class UnrepeatedSampler(ShardedSampler):
    """One replica's records with none repeated and none left out, as evaluation and prediction need.

    Replicas may differ by one record, and so by a batch: collectives do not belong in such a loop.

    Args:
        dataset: what has a length, or the length itself.
        num_replicas: number of replicas; None asks torch.distributed.
        rank: this replica, ``0 <= rank < num_replicas``; None asks torch.distributed.
        shuffle: whether every epoch has an order of its own; else the records come in the dataset's.
        seed: the same in every replica; it says the orders.

    Raises:
        ValueError: there is no such rank, or it is not given and torch.distributed is not initialised.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed)
        self.last = "keep"
