"""`Collectives`: a replica's place in the world, and what it does together with the others."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from polyxla.contracts.replication import ReduceOp, Replication
from polyxla.contracts.world import World
from polyxla.pytree import is_tensor
from polyxla.replica import reductions

if TYPE_CHECKING:
    import torch


class Collectives:
    """One replica's world, device and collectives. Belongs to one thread.

    Collectives (`all_reduce`, `reduce`, `all_gather`, `broadcast`, `barrier`) must be called by all replicas,
    in the same order.

    Args:
        replication: the runtime's side.
    """

    def __init__(self, replication: Replication) -> None:
        self._replication = replication

    @property
    def world(self) -> World:
        """This replica's place among all replicas."""
        return self._replication.world

    @property
    def ordinal(self) -> int:
        """This replica's number, ``0 <= ordinal < world_size``."""
        return self.world.ordinal

    @property
    def world_size(self) -> int:
        """Number of replicas."""
        return self.world.world_size

    @property
    def is_first(self) -> bool:
        """Whether this is ordinal 0, which prints and writes for all replicas."""
        return self.ordinal == 0

    @property
    def device(self) -> torch.device:
        """The torch device to compute on."""
        return self._replication.device

    @property
    def kind(self) -> str:
        """The runtime's name for the device, such as ``CPU`` or ``TPU``."""
        return self._replication.kind

    def to_device(self, value: Any) -> Any:
        """Return `value` with every tensor in it (nested lists, tuples, dicts) on the device."""
        return self._replication.to_device(value)

    def sync(self, wait: bool = False) -> None:
        """Submit pending work to the device; with `wait`, block until it is done."""
        self._replication.sync(wait)

    def all_reduce(self, value: Any, op: ReduceOp = "sum") -> Any:
        """Combine every replica's `value`.

        Args:
            value: a tensor (same shape and dtype everywhere), a number, or lists, tuples and dicts of
                them with the same structure everywhere. Numbers come back as numbers. Any other object
                that pickles is combined as Python does it: ``or`` unites sets, ``sum`` adds Counters.
            op: ``sum``, ``mean``, ``min``, ``max``, ``mul``, ``and`` or ``or``.

        Returns:
            The same result in every replica.
        """
        return reductions.combined(value, op, self._replication.all_reduce, self.all_gather)

    def reduce(self, value: Any, op: ReduceOp = "sum", destination: int = 0) -> Any:
        """Combine every replica's `value` for one of them.

        Args:
            value: as for `all_reduce`.
            op: as for `all_reduce`.
            destination: the ordinal that receives the result; the others receive None.

        Raises:
            ValueError: `destination` is not an ordinal.
        """
        self._check_ordinal("destination", destination)
        combined = self.all_reduce(value, op)
        # Before the others drop the result: a lazy device would never run their part of the collective, and
        # this replica would hang in it.
        self.sync()
        return combined if self.ordinal == destination else None

    def all_gather(self, value: Any) -> list[Any]:
        """Return every replica's `value` in ordinal order.

        Args:
            value: a tensor (same shape and dtype everywhere), or any object that pickles.
        """
        if is_tensor(value):
            return self._replication.all_gather(value)
        self.sync()
        payloads = self._replication.rendezvous("polyxla.all_gather", pickle.dumps(value))
        return [pickle.loads(payload) for payload in payloads]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the `value` of the replica whose ordinal is `source`.

        Args:
            value: a tensor (same shape and dtype everywhere), or any object that pickles; read in `source`
                only, but every replica must pass one of the same kind.
            source: the ordinal to take it from.

        Raises:
            ValueError: `source` is not an ordinal.
        """
        self._check_ordinal("source", source)
        return self.all_gather(value)[source]

    def _check_ordinal(self, name: str, ordinal: int) -> None:
        if not 0 <= ordinal < self.world_size:
            raise ValueError(f"{name}={ordinal} is not an ordinal: 0 <= {name} < {self.world_size}")

    def barrier(self, tag: str = "polyxla.barrier") -> None:
        """Wait until every replica has reached this call and submitted its pending work.

        Args:
            tag: names the barrier in errors; the same in every replica.
        """
        # Another replica may be reading a value that needs this replica's part of a collective.
        self.sync()
        self._replication.rendezvous(tag, b"")
