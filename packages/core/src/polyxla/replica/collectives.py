"""`Collectives`: one replica's world and device, and its collectives with the other replicas.

Tensors are combined by the device, everything else by Python.
"""

from __future__ import annotations

import functools
import numbers
import operator
import pickle
import statistics
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from polyxla.contracts.replication import ReduceOp, Replication, World
from polyxla.errors import DisagreementError
from polyxla.pytree import is_tensor

if TYPE_CHECKING:
    import torch

Value = TypeVar("Value")


class Collectives:
    """One replica's world, device and collectives. Belongs to one thread.

    Every replica must call the collectives (`all_reduce`, `reduce`, `all_gather`, `broadcast`, `barrier`), in
    the same order.

    Args:
        replication: the runtime's side.

    Attributes:
        world: this replica's numbers among all replicas.
        device: the torch device to compute on.
        kind: the runtime's name for the device, such as ``CPU`` or ``TPU``.
    """

    def __init__(self, replication: Replication) -> None:
        self._replication = replication
        self.world: World = replication.world
        self.device: torch.device = replication.device
        self.kind: str = replication.kind

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

    def to_device(self, value: Value) -> Value:
        """Return the pytree `value` with every tensor on the device."""
        moved: Value = self._replication.to_device(value)
        return moved

    def sync(self, wait: bool = False) -> None:
        """Submit pending work to the device; with `wait`, block until it is done."""
        self._replication.sync(wait)

    def all_reduce(self, value: Any, op: ReduceOp = "sum") -> Any:
        """Combine every replica's `value`.

        Args:
            value: a pytree of tensors, numbers and other objects that pickle, with the same structure, shapes
                and dtypes in every replica. Numbers stay numbers. Other objects are combined with Python's
                operators: ``or`` unites sets, ``sum`` adds `collections.Counter` objects.
            op: ``sum``, ``mean``, ``min``, ``max``, ``mul``, ``and`` or ``or``.

        Returns:
            The same result in every replica.
        """
        gather = functools.partial(self._gather, f"all_reduce ({op})")
        return combine(value, op, self._replication.all_reduce, gather)

    def reduce(self, value: Any, op: ReduceOp = "sum", destination: int = 0) -> Any:
        """Combine every replica's `value` and return the result in one replica only.

        Args:
            value: as for `all_reduce`.
            op: as for `all_reduce`.
            destination: the ordinal that receives the result; the others receive None.

        Raises:
            ValueError: `destination` is not an ordinal.
        """
        self._check_ordinal("destination", destination)
        result = self.all_reduce(value, op)
        # The other replicas drop the result. Without a sync, a lazy device would never run their part of the
        # collective, and this replica would hang in it.
        self.sync()
        return result if self.ordinal == destination else None

    def all_gather(self, value: Value) -> list[Value]:
        """Return every replica's `value` in ordinal order.

        Args:
            value: a tensor (same shape and dtype everywhere), or any object that pickles.
        """
        if not is_tensor(value):
            return self._gather("all_gather", "an object", value)
        tensor: Any = value
        gathered: list[Any] = self._replication.all_gather(tensor)
        return gathered

    def _gather(self, call: str, what: str, value: Any) -> list[Any]:
        """Return every replica's object.

        Raises:
            DisagreementError: another replica gathers for something else than `call` of `what`.
        """
        # A line ends it in the payload, and the tag of a barrier may have several.
        call = (f"{call} of {what}" if what else call).replace("\n", " ")
        # Another replica may be reading a value that depends on this replica's part of a pending collective.
        self.sync()
        # The call travels with the payload, so that replicas in different calls are found out at once.
        marked = call.encode() + b"\n" + pickle.dumps(value)
        payloads = self._replication.rendezvous("polyxla", marked)
        found = [payload.partition(b"\n") for payload in payloads]
        for other, (theirs, _, _) in enumerate(found):
            if theirs.decode() != call:
                raise DisagreementError(
                    f"replicas disagree: in the same turn, replica {self.ordinal} calls {call} and replica "
                    f"{other} {theirs.decode()}. All replicas must call the same collectives, in the same "
                    "order and with the same arguments"
                )
        return [pickle.loads(payload) for _, _, payload in found]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the `value` of the replica whose ordinal is `source`.

        Args:
            value: a tensor (same shape and dtype everywhere), or any object that pickles. Every replica must
                pass a value of the same kind, but only that of `source` is read. Pending work is submitted.
            source: the ordinal of the replica whose value is returned, the same in every replica.

        Raises:
            ValueError: `source` is not an ordinal.
        """
        self._check_ordinal("source", source)
        call = f"broadcast (source {source})"
        if is_tensor(value):
            # Gathering tensors does not compare the calls: with other sources, each replica would return
            # another value.
            self._gather(call, "a tensor", None)
            return self._replication.all_gather(value)[source]
        return self._gather(call, "an object", value)[source]

    def _check_ordinal(self, name: str, ordinal: int) -> None:
        if not 0 <= ordinal < self.world_size:
            raise ValueError(f"{name}={ordinal} is not an ordinal: 0 <= {name} < {self.world_size}")

    def barrier(self, tag: str = "polyxla.barrier") -> None:
        """Wait until every replica has reached this call and submitted its pending work.

        Args:
            tag: names the barrier in errors; the same in every replica.

        Raises:
            DisagreementError: another replica is at a barrier with another tag, or calls something else.
        """
        self._gather(f"barrier ({tag})", "", None)


def combine(
    value: Any,
    op: ReduceOp,
    reduce_tensor: Callable[[Any, ReduceOp], Any],
    gather: Callable[[str, Any], list[Any]],
    path: str = "",
) -> Any:
    """Combine every replica's `value`. A collective.

    Args:
        value: this replica's pytree, as for `polyxla.Replica.all_reduce`.
        op: how to combine.
        reduce_tensor: combines one tensor; a collective.
        gather: returns every replica's object in ordinal order, if all describe it alike; a collective.
        path: where the value is in the whole pytree.
    """
    if is_tensor(value):
        return reduce_tensor(value, op)
    if isinstance(value, Mapping):
        # Sorted: every replica must run the same collectives, even if its dict was filled in another order.
        found = {
            key: combine(value[key], op, reduce_tensor, gather, f"{path}[{key!r}]")
            for key in sorted(value, key=repr)
        }
        # The result keeps the order of this replica's own dict.
        return {key: found[key] for key in value}
    if isinstance(value, list | tuple):
        items = [combine(item, op, reduce_tensor, gather, f"{path}[{n}]") for n, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return _COMBINE[op](gather(_described(value, path), value))


def _described(value: Any, path: str) -> str:
    # NumPy would broadcast an array to the shape of another replica's.
    array = f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") and hasattr(value, "dtype") else ""
    return " at ".join(filter(None, (array or "an object", path)))


def _fold(function: Callable[[Any, Any], Any]) -> Callable[[list[Any]], Any]:
    return lambda values: functools.reduce(function, values)


def _total(values: list[Any]) -> Any:
    # Python's sum starts from 0: it turns bools into integers, and fails for anything but numbers.
    is_number = isinstance(values[0], numbers.Number)
    return sum(values) if is_number else functools.reduce(operator.add, values)


_COMBINE: Mapping[ReduceOp, Callable[[list[Any]], Any]] = {
    "sum": _total,
    "mean": statistics.fmean,
    "min": min,
    "max": max,
    "mul": _fold(operator.mul),
    "and": _fold(operator.and_),
    "or": _fold(operator.or_),
}
