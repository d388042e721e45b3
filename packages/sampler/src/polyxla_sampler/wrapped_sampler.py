"""Divide the items of any other sampler or batch sampler among replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import Sampler

from polyxla_sampler.resume import RoundRobinEpochs, State
from polyxla_sampler.round_robin import resolve_rank, round_robin
from polyxla_sampler.seeded_rng import derive_seed, iterate_seeded, with_generator

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
        drawn = _seeded_items(self.sampler, self.seed, state["epoch"])
        return round_robin(drawn, state["position"], self.num_replicas, self.rank, self.remainder)


def _seeded_items(sampler: Iterable[Any], seed: int | None, epoch: int) -> Iterable[Any]:
    _set_epoch(sampler, epoch)
    if seed is None:
        return sampler
    seed = derive_seed(seed, epoch)
    return iterate_seeded(partial(with_generator, sampler, seed), seed, BLOCK)


def _set_epoch(sampler: Any, epoch: int) -> None:
    """Call `set_epoch` of the sampler and of the samplers inside it, if they have it."""
    while sampler is not None:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        sampler = getattr(sampler, "sampler", None)
