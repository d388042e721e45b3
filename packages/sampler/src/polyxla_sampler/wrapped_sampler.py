"""Dividing what a sampler of any kind draws: indices, or whole batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import Sampler

from polyxla_sampler.permutation import derive_seed
from polyxla_sampler.resume import InTurn, State
from polyxla_sampler.round_robin import deal, own_place
from polyxla_sampler.seeded_rng import seeded, with_generator

BLOCK = 1024
"""Items drawn between two exchanges of the random generators, which take some 0.1 ms."""


class DealtSampler(InTurn, Sampler[Any]):
    """One replica's part of what another sampler or batch sampler draws; batches stay whole.

    Every replica draws everything and takes its turn, so all must draw the same: the sampler's `generator`
    (on a copy, also of a sampler within it) or else the process's generators are seeded for each epoch.
    A sampler that draws from somewhere else must be made equal in all replicas by its owner. To go on in
    the middle of an epoch it draws what was consumed once more, which loads no data.

    Args:
        sampler: gives indices, or lists of them.
        num_replicas: number of replicas; None asks torch.distributed.
        rank: this replica, ``0 <= rank < num_replicas``; None asks torch.distributed.
        seed: the same in every replica; None leaves the sampler's own randomness alone.
        drop_last: leave the last items out where they do not go round, instead of repeating the first.

    Raises:
        ValueError: there is no such rank, or it is not given and torch.distributed is not initialised.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int | None = 0,
        drop_last: bool = False,
    ) -> None:
        self.num_replicas, self.rank = own_place(num_replicas, rank)
        self.sampler = sampler
        self.seed = seed
        self.last = "drop" if drop_last else "repeat"

    def total(self) -> int | None:
        """Return how many items the sampler says it has."""
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
        """Iterate over this replica's items from `state` on."""
        drawn = _drawn(self.sampler, self.seed, state["epoch"])
        return deal(drawn, state["position"], self.num_replicas, self.rank, self.last)


def _drawn(sampler: Iterable[Any], seed: int | None, epoch: int) -> Iterable[Any]:
    _tell_epoch(sampler, epoch)
    if seed is None:
        return sampler
    seed = derive_seed(seed, epoch)
    return seeded(partial(with_generator, sampler, seed), seed, BLOCK)


def _tell_epoch(sampler: Any, epoch: int) -> None:
    """Call `set_epoch` of the sampler and of the one within it, where they have it."""
    while sampler is not None:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        sampler = getattr(sampler, "sampler", None)
