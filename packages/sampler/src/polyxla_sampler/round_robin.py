"""Round-robin division: the first item goes to replica 0, the second to replica 1, and so on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Literal, TypeVar

Remainder = Literal["repeat", "drop", "keep"]
"""How to treat items left over after full rounds: add repeats, drop them, or let the counts differ."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Division:
    """How many items each replica gets.

    Args:
        items: number of items.
        replicas: number of replicas, from 1.
        remainder: how to treat the rest if `items` is not a multiple of `replicas`.
    """

    items: int
    replicas: int
    remainder: Remainder

    def valid(self, rank: int) -> int:
        """Return how many items replica `rank` gets, repeats not counted."""
        if self.remainder == "drop":
            return self.items // self.replicas
        return len(range(rank, self.items, self.replicas))

    def count(self, rank: int) -> int:
        """Return how many items replica `rank` gets, repeats included."""
        return self.valid(0 if self.remainder == "repeat" else rank)


def round_robin(
    items: Iterable[Item], start: int, replicas: int, rank: int, remainder: Remainder
) -> Iterator[Item]:
    """Iterate over the items of replica `rank` after the first `start` items.

    Holds at most as many items as there are replicas. Repeats are the first of all `items`, several times
    over if there are fewer of them than are missing.
    """
    stream = iter(items)
    first = list(islice(stream, replicas))
    rest = islice(chain(first, stream), start, None)
    while len(group := list(islice(rest, replicas))) == replicas:
        yield group[rank]
    if rank < len(group) and remainder != "drop":
        yield group[rank]
    elif group and remainder == "repeat":
        yield next(islice(cycle(first), rank - len(group), None))


def resolve_rank(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of replicas and this replica's rank; ask torch.distributed for a missing one.

    Raises:
        ValueError: one is missing and torch.distributed is not initialized, or `rank` is out of range.
    """
    if num_replicas is None or rank is None:
        distributed_count, distributed_rank = _distributed_rank()
        num_replicas = distributed_count if num_replicas is None else num_replicas
        rank = distributed_rank if rank is None else rank
    if not 0 <= rank < num_replicas:
        raise ValueError(
            f"rank={rank} is not one of {num_replicas} replicas. Ranks go from 0 to num_replicas - 1."
        )
    return num_replicas, rank


def _distributed_rank() -> tuple[int, int]:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "num_replicas and rank are not both given, and torch.distributed, which knows them, is not "
            "initialized. Pass num_replicas= and rank=, or call torch.distributed.init_process_group first."
        )
    return dist.get_world_size(), dist.get_rank()
