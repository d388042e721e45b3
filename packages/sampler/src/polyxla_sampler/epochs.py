"""Epochs whose items go to the replicas round-robin, and that can be resumed in the middle.

The first item goes to replica 0, the second to replica 1, and so on. Another number of replicas may resume.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, Literal, TypeVar

Remainder = Literal["repeat", "drop", "keep"]
"""The treatment of items left over after full rounds: add repeats, drop them, or let the counts differ."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Division:
    """The number of items that each replica gets.

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
    # Kept for repeats at the end of the stream, which cannot be rewound.
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


State = dict[str, Any]
"""The position of all replicas in an epoch: JSON types only, and the same in each replica."""


class ResumableEpochs(ABC):
    """Base class: counts the epochs, saves a position in one and resumes from it.

    Attributes:
        epoch: number of the next epoch to iterate over, from 0.
    """

    epoch = 0
    # The position of the next iteration: 0, or where a loaded state was.
    _position: Any = 0
    # The state at the start of the latest iteration.
    _began: State | None = None
    # The same, from begin() until the iterator is made.
    _pending: State | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch. A loaded state is dropped if it is of another epoch."""
        # A loader sets the epoch before each iteration; only another epoch makes the loaded position
        # invalid.
        if epoch != self.epoch:
            self._position = self._start_position()
        self.epoch = epoch

    def state_dict(self, consumed: int) -> State:
        """Return the position of the replicas in the latest iteration.

        Args:
            consumed: number of items of that iteration that this replica's loop has used; items that were
                only prefetched do not count. The other replicas have used the same number.
        """
        return self.state_after(self._began or self.next_state(), consumed)

    def load_state_dict(self, state: State) -> None:
        """Resume the next iteration from `state`; the iterations after it are whole epochs.

        Raises:
            ValueError: `state` belongs to other data, another order or another kind of sampler.
        """
        # A position means nothing in another order, and would silently skip and repeat records.
        for name, value in self.identity().items():
            if name not in state or state[name] != value:
                raise ValueError(
                    f"the state was saved with {name}={state.get(name)!r}, and {type(self).__name__} has "
                    f"{name}={value!r}. Load it with the data and settings that it was saved with, or start "
                    "the epoch from its beginning."
                )
        self.epoch, self._position, self._began = state["epoch"], state["position"], None
        self._pending = None

    def next_state(self) -> State:
        """Return the state at the start of the next iteration."""
        return {**self.identity(), "epoch": self.epoch, "position": self._position}

    def begin(self) -> State:
        """Begin an iteration and return its state; the next call of `iter` continues it.

        The two are separate because a DataLoader without workers makes its sampler's iterator only when it
        is asked for the first batch. Calls in between must already refer to this iteration.
        """
        state = self._began = self._pending = self.next_state()
        self._position = self._start_position()
        return state

    def started(self) -> State:
        """Return the state of the iteration to make an iterator for; begin one if none is pending."""
        # A sampler that is iterated over without a loader begins by itself.
        state = self._pending or self.begin()
        self._pending = None
        return state

    def _start_position(self) -> Any:
        """Return the position at the start of a whole epoch."""
        return 0

    @abstractmethod
    def identity(self) -> State:
        """Return the settings that must be equal for a state to be loaded."""

    @abstractmethod
    def state_after(self, state: State, consumed: int) -> State:
        """Return the state after every replica has used `consumed` items, starting from `state`."""


class RoundRobinEpochs(ResumableEpochs):
    """Epochs whose items go to the replicas round-robin; the position counts the items used by all."""

    num_replicas: int
    rank: int
    remainder: Remainder

    @abstractmethod
    def total(self) -> int | None:
        """Return how many items an epoch has for all replicas together; None if that is unknown."""

    def __len__(self) -> int:
        """Return how many items the next iteration has for this replica.

        Raises:
            TypeError: the number is unknown.
        """
        count = self.count(self.next_state())
        if count is None:
            raise TypeError(
                f"{type(self).__name__} has no len(), because the sampler that it divides has none."
            )
        return count

    def count(self, state: State) -> int | None:
        """Return how many items this replica gets from `state` to the end of the epoch."""
        division = self._division(state)
        return None if division is None else division.count(self.rank)

    def valid(self, state: State) -> int | None:
        """Return how many of those items are not repeats; the repeats come last."""
        division = self._division(state)
        return None if division is None else division.valid(self.rank)

    def state_after(self, state: State, consumed: int) -> State:
        """Return the state after every replica has used `consumed` items, starting from `state`."""
        # All replicas have used the same number of items, so one number is the position of all.
        position = state["position"] + consumed * self.num_replicas
        total, count = self.total(), self.count(state)
        if total is not None and count is not None:
            # Once this replica has used all of its items, the epoch is over, dropped items included.
            position = total if consumed >= count else min(position, total)
        return {**state, "position": position}

    def _division(self, state: State) -> Division | None:
        total = self.total()
        if total is None:
            return None
        return Division(max(total - state["position"], 0), self.num_replicas, self.remainder)
