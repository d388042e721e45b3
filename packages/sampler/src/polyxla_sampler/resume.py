"""Epochs that can be left in the middle and gone on with, also by another number of replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from polyxla_sampler.round_robin import Division, Last

State = dict[str, Any]
"""Where all replicas stand in an epoch: JSON types only, and the same in each of them."""


class Resumable(ABC):
    """What the samplers here have in common: an epoch, and states to go on from.

    Attributes:
        epoch: which epoch the coming iteration is, from 0.
    """

    epoch = 0
    _position: Any = 0
    _began: State | None = None
    _pending: State | None = None

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next. Another one than a state was loaded for begins at its start."""
        if epoch != self.epoch:
            self._position = self._beginning()
        self.epoch = epoch

    def state_dict(self, consumed: int) -> State:
        """Return where the replicas stand in the iteration that began last.

        Args:
            consumed: how many items this replica's loop has had of it: what was read ahead and not used
                yet does not count. The other replicas have had as many.
        """
        return self.advanced(self._began or self.coming(), consumed)

    def load_state_dict(self, state: State) -> None:
        """Let the next iteration go on where `state` was; those after it are whole epochs.

        Raises:
            ValueError: `state` is not of this data, order or kind of sampler.
        """
        for name, value in self.identity().items():
            if name not in state or state[name] != value:
                raise ValueError(
                    f"the state was saved with {name}={state.get(name)!r}, and {type(self).__name__} has "
                    f"{name}={value!r}. Load it where data and settings are those it was saved with, or "
                    "begin the epoch anew without it."
                )
        self.epoch, self._position, self._began = state["epoch"], state["position"], None
        self._pending = None

    def coming(self) -> State:
        """Return the state at the beginning of the coming iteration."""
        return {**self.identity(), "epoch": self.epoch, "position": self._position}

    def begin(self) -> State:
        """Begin an iteration, which the next `iter` is about even if it comes late, and return its state.

        A DataLoader without workers asks its sampler for an iterator when it is first asked for data.
        """
        state = self._began = self._pending = self.coming()
        self._position = self._beginning()
        return state

    def started(self) -> State:
        """Return the state of the iteration that `iter` was asked for."""
        state = self._pending or self.begin()
        self._pending = None
        return state

    def _beginning(self) -> Any:
        """Return the position at which a whole epoch starts."""
        return 0

    @abstractmethod
    def identity(self) -> State:
        """Return what must be the same where a state is loaded."""

    @abstractmethod
    def advanced(self, state: State, consumed: int) -> State:
        """Return the state after every replica consumed that many items from `state` on."""


class InTurn(Resumable):
    """A sampler whose items go to the replicas in turn; its position is how many all of them have had."""

    num_replicas: int
    rank: int
    last: Last

    @abstractmethod
    def total(self) -> int | None:
        """Return how many items an epoch has for all replicas together; None where nobody can say."""

    def __len__(self) -> int:
        """Return how many items the coming iteration has for this replica.

        Raises:
            TypeError: nobody can say.
        """
        count = self.count(self.coming())
        if count is None:
            raise TypeError(f"{type(self).__name__} has no len(): what it divides has none.")
        return count

    def count(self, state: State) -> int | None:
        """Return how many items this replica gets from `state` to the end of the epoch."""
        division = self._division(state)
        return None if division is None else division.count(self.rank)

    def valid(self, state: State) -> int | None:
        """Return how many of them are not repeated to make counts equal; those that are come last."""
        division = self._division(state)
        return None if division is None else division.valid(self.rank)

    def advanced(self, state: State, consumed: int) -> State:
        """Return the state after every replica consumed that many items from `state` on."""
        position = state["position"] + consumed * self.num_replicas
        total, count = self.total(), self.count(state)
        if total is not None and count is not None:
            # With all that this replica gets the epoch is over, dropped items included.
            position = total if consumed >= count else min(position, total)
        return {**state, "position": position}

    def _division(self, state: State) -> Division | None:
        total = self.total()
        if total is None:
            return None
        return Division(max(total - state["position"], 0), self.num_replicas, self.last)
