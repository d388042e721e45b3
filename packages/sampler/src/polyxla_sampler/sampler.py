"""Samplers that divide a dataset among replicas, in a shuffled order that takes no memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from polyxla_sampler.permutation import make_order, wrap_around
from polyxla_sampler.resume import RoundRobinEpochs, State
from polyxla_sampler.round_robin import resolve_rank
from polyxla_sampler.seeded_rng import derive_seed


class ShardedSampler(RoundRobinEpochs, Sampler[int]):
    """One replica's records of every epoch; replaces `torch.utils.data.DistributedSampler`.

    It takes the same arguments and gives every replica the same number of records. Unlike torch's sampler
    it starts at once for a dataset of any length, stores no list of indices, and can be resumed in the
    middle of an epoch.

    Args:
        dataset: an object with a length, or the length itself.
        num_replicas: number of replicas; None asks torch.distributed.
        rank: this replica, ``0 <= rank < num_replicas``; None asks torch.distributed.
        shuffle: use a new random order in every epoch; otherwise the dataset's order.
        seed: determines the orders; must be the same in every replica.
        drop_last: drop the last records if they do not divide evenly, instead of repeating the first ones.

    Raises:
        ValueError: `rank` is out of range, or one of the two is missing and torch.distributed is not
            initialized.
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
        self.num_replicas, self.rank = resolve_rank(num_replicas, rank)
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.remainder = "drop" if drop_last else "repeat"

    def total(self) -> int:
        """Return the number of records."""
        return self.dataset if isinstance(self.dataset, int) else len(self.dataset)

    def identity(self) -> State:
        """Return the length and everything that determines the order."""
        seed = self.seed if self.shuffle else None
        return {"length": self.total(), "shuffle": self.shuffle, "seed": seed}

    def __iter__(self) -> Iterator[int]:
        state = self.started()
        count = self.count(state)
        assert count is not None
        order = make_order(self.total(), self.shuffle, derive_seed(self.seed, state["epoch"]))
        # Beyond the last record on purpose: wrap_around turns those positions into repeats.
        positions = range(state["position"] + self.rank, sys.maxsize, self.num_replicas)
        return wrap_around(order, positions[:count])


class UnrepeatedSampler(ShardedSampler):
    """One replica's records without repeated or dropped ones, as evaluation and prediction need.

    Replicas may differ by one record, and so by one batch: do not use collectives in such a loop.

    Args:
        dataset: an object with a length, or the length itself.
        num_replicas: number of replicas; None asks torch.distributed.
        rank: this replica, ``0 <= rank < num_replicas``; None asks torch.distributed.
        shuffle: use a new random order in every epoch; otherwise the dataset's order.
        seed: determines the orders; must be the same in every replica.

    Raises:
        ValueError: `rank` is out of range, or one of the two is missing and torch.distributed is not
            initialized.
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
        self.remainder = "keep"
