"""`Replica`: what a person's function holds in each replica."""

from __future__ import annotations

import builtins
import functools
import numbers
import operator
import pickle
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from polyxla.errors import UsageError
from polyxla.plugins import register_listener
from polyxla.precision import Precision
from polyxla.replication import ReduceOp, Replication
from polyxla.tree import is_tensor
from polyxla.world import World

if TYPE_CHECKING:
    import pluggy
    import torch


class Replica:
    """One copy of the program on one device.

    Every method that meets other replicas (`all_reduce`, `reduce`, `all_gather`, `broadcast`, `barrier`,
    `step`) must be called by all of them, in the same order. Belongs to one thread.

    Args:
        replication: the runtime's side.
        plugins: who hears this replica's events.
        precision: the policy in force.
        runtime: the runtime's name.

    Attributes:
        steps: optimizer updates so far.
    """

    def __init__(
        self, replication: Replication, plugins: pluggy.PluginManager, precision: Precision, runtime: str
    ) -> None:
        self.precision = precision
        self.runtime = runtime
        self.steps = 0
        self._replication = replication
        self._plugins = plugins

    @property
    def world(self) -> World:
        """Where this replica stands among all."""
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
        """Whether this is ordinal 0, the one that prints and writes for all."""
        return self.ordinal == 0

    @property
    def device(self) -> torch.device:
        """The torch device to compute on."""
        return self._replication.device

    @property
    def kind(self) -> str:
        """What the runtime calls the device, such as ``CPU`` or ``TPU``."""
        return self._replication.kind

    def add_listener(self, listener: object) -> None:
        """Let an object with hook implementations (`polyxla.hookimpl`) hear this replica's events."""
        register_listener(self._plugins, listener)

    def to_device(self, value: Any) -> Any:
        """Return `value` with every tensor in it (nested lists, tuples, dicts) on the device."""
        return self._replication.to_device(value)

    def loader(self, loader: Iterable[Any]) -> Iterable[Any]:
        """Return `loader` reading this replica's records only, its batches on the device.

        Raises:
            UsageError: there are several replicas and no plugin can divide the records among them.
        """
        if self.world_size > 1:
            loader = self._sharded(loader)
        return _Uploaded(loader, self._replication)

    def _sharded(self, loader: Iterable[Any]) -> Iterable[Any]:
        mine: Iterable[Any] | None = self._plugins.hook.polyxla_shard_loader(loader=loader, world=self.world)
        if mine is None:
            raise UsageError(
                f"no installed plugin can divide the records of {type(loader).__name__} "
                f"among {self.world_size} replicas, and all of them would train on the same",
                fix="Install one (pip install polyxla-sampler), or divide them yourself and use to_device.",
            )
        return mine

    def step(self, optimizer: torch.optim.Optimizer, logged: Mapping[str, Any] | None = None) -> None:
        """Average the gradients over the replicas, update the parameters, hand the step to the device.

        Args:
            optimizer: holds this replica's parameters, whose gradients are ready.
            logged: values to show to listeners under their names; tensors may stay on the device.
        """
        self._replication.reduce_gradients(optimizer)
        optimizer.step()
        self._replication.sync()
        self.steps += 1
        self._plugins.hook.polyxla_step_finished(replica=self, step=self.steps, logged=logged or {})

    def publish(self, metrics: Mapping[str, float]) -> None:
        """Tell listeners numbers that hold for all replicas, such as a validation's."""
        self._plugins.hook.polyxla_metrics_ready(replica=self, step=self.steps, metrics=metrics)

    def sync(self, wait: bool = False) -> None:
        """Hand pending work to the device; with `wait`, return when it is done."""
        self._replication.sync(wait)

    def seed(self, seed: int) -> None:
        """Seed the device's random numbers of this replica."""
        self._replication.seed(seed)

    def report(self) -> str:
        """Return the runtime's own account of compilations, executions and transfers."""
        return self._replication.report()

    def all_reduce(self, value: Any, op: ReduceOp = "sum") -> Any:
        """Combine every replica's `value`.

        Args:
            value: a tensor (same shape and dtype everywhere), a number, or lists, tuples and dicts of
                them with the same structure everywhere. Numbers come back as numbers. Any other object
                that pickles is combined as Python does it: ``or`` unites sets, ``sum`` adds Counters.
            op: ``sum``, ``mean``, ``min``, ``max``, ``mul``, ``and`` or ``or``.
        """
        if is_tensor(value):
            return self._replication.all_reduce(value, op)
        if isinstance(value, Mapping):
            # Sorted: replicas that filled their dicts in another order must still meet key by key.
            combined = {key: self.all_reduce(value[key], op) for key in sorted(value, key=repr)}
            return {key: combined[key] for key in value}
        if isinstance(value, list | tuple):
            items = [self.all_reduce(item, op) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return _COMBINE[op](self.all_gather(value))

    def reduce(self, value: Any, op: ReduceOp = "sum", destination: int = 0) -> Any:
        """Combine every replica's `value` for one of them.

        Args:
            value: as for `all_reduce`.
            op: as for `all_reduce`.
            destination: the ordinal that is given the result; the others get None.

        Raises:
            ValueError: there is no such ordinal.
        """
        self._check_ordinal("destination", destination)
        combined = self.all_reduce(value, op)
        # Before the others drop it: a lazy device would never run their part, and this one wait for ever.
        self._replication.sync()
        return combined if self.ordinal == destination else None

    def all_gather(self, value: Any) -> list[Any]:
        """Return every replica's `value` in ordinal order.

        Args:
            value: a tensor (same shape and dtype everywhere), or any object that pickles.
        """
        if is_tensor(value):
            return self._replication.all_gather(value)
        payloads = self._replication.rendezvous("polyxla.all_gather", pickle.dumps(value))
        return [pickle.loads(payload) for payload in payloads]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the `value` of the replica whose ordinal is `source`.

        Raises:
            ValueError: there is no such ordinal.
        """
        self._check_ordinal("source", source)
        return self.all_gather(value)[source]

    def _check_ordinal(self, name: str, ordinal: int) -> None:
        if not 0 <= ordinal < self.world_size:
            raise ValueError(f"{name}={ordinal} is not an ordinal: 0 <= {name} < {self.world_size}")

    def barrier(self, tag: str = "polyxla.barrier") -> None:
        """Wait until every replica is here."""
        self._replication.rendezvous(tag, b"")

    def print(self, *values: Any, **options: Any) -> None:
        """Print on ordinal 0 only."""
        if self.is_first:
            builtins.print(*values, **options, flush=True)


class _Uploaded:
    """A loader whose batches arrive on the device; it can be iterated over again."""

    def __init__(self, loader: Iterable[Any], replication: Replication) -> None:
        self.loader = loader
        self._replication = replication

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return self._replication.upload(self.loader)


def _fold(function: Callable[[Any, Any], Any]) -> Callable[[list[Any]], Any]:
    return lambda values: functools.reduce(function, values)


def _total(values: list[Any]) -> Any:
    # Only numbers can be added to the 0 that Python's sum starts from, which makes numbers of bools.
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
