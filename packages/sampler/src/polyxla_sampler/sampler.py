"""Samplers that divide among replicas: a dataset's records, or the items of any other sampler."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sized
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import Sampler

from polyxla_sampler.epochs import RoundRobinEpochs, State, resolve_rank, round_robin
from polyxla_sampler.permutation import make_order, wrap_around
from polyxla_sampler.seeded_rng import derive_seed, iterate_seeded, with_generator


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
        # Without a shuffle the seed changes nothing, so a state may be loaded with another seed.
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


BLOCK = 1024
"""Items drawn between two exchanges of the random generators, each of which takes about 0.1 ms."""


class RoundRobinSampler(RoundRobinEpochs, Sampler[Any]):
    """One replica's items of another sampler or batch sampler, divided round-robin; batches stay whole.

    Every replica draws all items and keeps its own, so all replicas must draw the same ones. For every
    epoch the sampler's `generator` (in a copy; also that of a sampler inside it) and the process's
    generators are seeded. A sampler that draws from any other generator must be seeded by the user, equally
    in all replicas. To resume in the middle of an epoch, the items before are drawn again; no data is loaded
    for them.

    Args:
        sampler: yields indices, or lists of indices.
        num_replicas: number of replicas; None asks torch.distributed.
        rank: this replica, ``0 <= rank < num_replicas``; None asks torch.distributed.
        seed: must be the same in every replica; None seeds nothing.
        drop_last: drop the last items if they do not divide evenly, instead of repeating the first ones.

    Raises:
        ValueError: `rank` is out of range, or one of the two is missing and torch.distributed is not
            initialized.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int | None = 0,
        drop_last: bool = False,
    ) -> None:
        self.num_replicas, self.rank = resolve_rank(num_replicas, rank)
        self.sampler = sampler
        self.seed = seed
        self.remainder = "drop" if drop_last else "repeat"

    def total(self) -> int | None:
        """Return the sampler's length; None if it has none."""
        try:
            return len(self.sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    def identity(self) -> State:
        """Return the number of items and the seed."""
        return {"items": self.total(), "seed": self.seed}

    def __iter__(self) -> Iterator[Any]:
        return self.items(self.started())

    def items(self, state: State) -> Iterator[Any]:
        """Iterate over this replica's items, starting from `state`."""
        # All items are drawn again up to the position: the order of any other sampler is only known by
        # drawing it.
        drawn = _seeded_items(self.sampler, self.seed, state["epoch"])
        return round_robin(drawn, state["position"], self.num_replicas, self.rank, self.remainder)


class EvaluationSampler(Sampler[Any]):
    """A replica's items in an evaluation: none counts twice, and all replicas get equally many batches.

    A replica with one item less than the first has a smaller last batch. If that leaves the batch empty, a
    repeat is the whole batch.

    Args:
        epochs: divides the items, with repeats.
        batch_size: number of items per batch.
        drop_last: drop the last batch if the first replica has too few items for it.
    """

    def __init__(self, epochs: ShardedSampler | RoundRobinSampler, batch_size: int, drop_last: bool) -> None:
        self.epochs = epochs
        self.batch_size = batch_size
        self.drop_last = drop_last

    def batches(self, state: State) -> tuple[int, int] | None:
        """Return the number of batches after `state`, and of those without repeats; None if it is unknown."""
        count, valid = self.epochs.count(state), self.epochs.valid(state)
        if count is None or valid is None:
            return None
        batches = count // self.batch_size if self.drop_last else -(-count // self.batch_size)
        return batches, min(batches, -(-valid // self.batch_size))

    def __len__(self) -> int:
        """Return how many items the next iteration has.

        Raises:
            TypeError: the number is unknown.
        """
        count = self._count(self.epochs.next_state())
        return len(self.epochs) if count is None else count

    def __iter__(self) -> Iterator[Any]:
        items = iter(self.epochs)
        return islice(items, self._count(self.epochs.state_dict(0)))

    def _count(self, state: State) -> int | None:
        found, valid = self.batches(state), self.epochs.valid(state)
        if found is None or valid is None:
            return None
        batches, real = found
        return min(valid, batches * self.batch_size) + batches - real


def _seeded_items(sampler: Iterable[Any], seed: int | None, epoch: int) -> Iterable[Any]:
    _set_epoch(sampler, epoch)
    if seed is None:
        return sampler
    seed = derive_seed(seed, epoch)
    return iterate_seeded(partial(with_generator, sampler, seed), seed, BLOCK)


def _set_epoch(sampler: Any, epoch: int) -> None:
    """Call `set_epoch` of the sampler and of the samplers inside it, if they have it."""
    # A batch sampler holds the sampler whose order depends on the epoch.
    while sampler is not None:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        sampler = getattr(sampler, "sampler", None)
