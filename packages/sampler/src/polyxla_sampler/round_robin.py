"""Dealing items to replicas in turn: the first to replica 0, the second to replica 1, and so on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Literal, TypeVar

Last = Literal["repeat", "drop", "keep"]
"""What is done when items do not go round: repeat the first, drop the last, or let counts differ."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Division:
    """How many items each replica gets.

    Args:
        items: number of items there are.
        replicas: number of replicas, from 1.
        last: what happens where `items` is no multiple of `replicas`.
    """

    items: int
    replicas: int
    last: Last

    def valid(self, rank: int) -> int:
        """Return how many items replica `rank` gets that no other one gets as well."""
        if self.last == "drop":
            return self.items // self.replicas
        return len(range(rank, self.items, self.replicas))

    def count(self, rank: int) -> int:
        """Return how many items replica `rank` gets."""
        return self.valid(0 if self.last == "repeat" else rank)


def deal(items: Iterable[Item], start: int, replicas: int, rank: int, last: Last) -> Iterator[Item]:
    """Iterate over the items that replica `rank` gets of all but the first `start`.

    Holds no more items than there are replicas. What is repeated are the first of all `items`, again and
    again where they are fewer than are missing.
    """
    stream = iter(items)
    first = list(islice(stream, replicas))
    rest = islice(chain(first, stream), start, None)
    while len(group := list(islice(rest, replicas))) == replicas:
        yield group[rank]
    if rank < len(group) and last != "drop":
        yield group[rank]
    elif group and last == "repeat":
        yield next(islice(cycle(first), rank - len(group), None))


def own_place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of replicas and this one's, from torch.distributed where they are not given.

    Raises:
        ValueError: they are not given and nobody can say them, or `rank` is not one of the replicas.
    """
    if num_replicas is None or rank is None:
        size, here = _distributed_place()
        num_replicas = size if num_replicas is None else num_replicas
        rank = here if rank is None else rank
    if not 0 <= rank < num_replicas:
        raise ValueError(
            f"rank={rank} is not one of {num_replicas} replicas. Ranks go from 0 to num_replicas - 1."
        )
    return num_replicas, rank


def _distributed_place() -> tuple[int, int]:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "num_replicas and rank are not both given, and torch.distributed, which would know them, is not "
            "initialised. Pass num_replicas= and rank=, or call torch.distributed.init_process_group before."
        )
    return dist.get_world_size(), dist.get_rank()
