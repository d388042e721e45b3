"""`Replica`: what a person's function holds in each replica."""

from __future__ import annotations

import builtins
import pickle
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from polyxla import combining, seeding
from polyxla.batches import Reading
from polyxla.errors import UsageError
from polyxla.gauge import Gauge
from polyxla.loader import Loader
from polyxla.notices import say_once
from polyxla.plugins import register_listener
from polyxla.precision import Precision
from polyxla.replication import ReduceOp, Replication
from polyxla.tree import is_tensor
from polyxla.world import World

if TYPE_CHECKING:
    import pluggy
    import torch

    from polyxla.fit import Fit


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
        input: the loader whose batch was asked for last; None before the first.
        data_seed: where the order of shuffled records comes from; the same in every replica.
    """

    def __init__(
        self, replication: Replication, plugins: pluggy.PluginManager, precision: Precision, runtime: str
    ) -> None:
        self.precision = precision
        self.runtime = runtime
        self.steps = 0
        self.input: Loader | None = None
        self.data_seed = 0
        self._replication = replication
        self._plugins = plugins
        self._is_cut = False
        self._is_set_up = False
        # What was checked, kept so that no other object gets its id.
        self._checked: list[Any] = []

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

    def loader(
        self,
        loader: Iterable[Any],
        *,
        pad: bool = False,
        repeat: bool = True,
        prefetch: Mapping[str, int] | None = None,
    ) -> Loader:
        """Return `loader` reading this replica's records only, its batches on the device.

        Where the loop has not handed its work to the device since the last batch, the next one does it.

        Args:
            loader: a DataLoader, or anything that can be iterated over.
            pad: give every batch the shape of a full one: one epoch is one program. `Loader.valid` tells
                which records are real.
            repeat: whether records are read twice to give every replica as many, as training needs it.
                Without, they are left out, or masked with `pad`: metrics are exact.
            prefetch: how far to copy ahead, in the runtime's words: on torch_xla ``loader_prefetch_size``,
                ``device_prefetch_size`` and ``host_to_device_transfer_threads``.

        Raises:
            UsageError: there are several replicas and no plugin can divide the records among them.
        """
        mine: Iterable[Any] | None = self._plugins.hook.polyxla_shard_loader(
            loader=loader, world=self.world, seed=self.data_seed, repeat=repeat
        )
        if mine is None and self.world_size > 1:
            raise UsageError(
                f"no installed plugin can divide the records of {type(loader).__name__} "
                f"among {self.world_size} replicas, and all of them would train on the same",
                fix="Install one (pip install polyxla-sampler), or divide them yourself and use to_device.",
            )
        # With one replica there is nothing to divide, and nothing to wonder about.
        if self.world_size > 1 and self.is_first and (note := getattr(mine, "note", "")):
            say_once(note)
        source = loader if mine is None else mine
        return Loader(source, Reading(pad, repeat, prefetch or {}), self._replication, self._before_batch)

    def _before_batch(self, loader: Loader) -> None:
        self.input = loader
        if not self._is_cut:
            self.sync()
        self._is_cut = False

    def setup(self, module: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> torch.nn.Module:
        """Bring `module` to the device, in the precision asked for, the same in every replica.

        Tied parameters stay tied. Where replicas made different ones, ordinal 0's are used, and it is said.

        Args:
            module: moved in place.
            optimizers: those that were made from its parameters before; they hold the moved ones afterwards.

        Raises:
            UsageError: an optimizer holds parameters that are not the module's, which is as it was then; or
                the policy refuses the module.
        """
        from polyxla import agreement
        from polyxla.move import check_owner, move_module

        # Before a policy changes a module that is then refused.
        check_owner(module, optimizers)
        differs = agreement.differing(self, module)
        try:
            module = self.precision.convert(module)
        except ValueError as error:
            raise UsageError(
                str(error), where=f"precision {self.precision.name}", fix="Change what the policy is told."
            ) from error
        move_module(module, self.device, optimizers)
        if differs:
            agreement.take_from_first(self, module)
            if self.is_first:
                say_once(f"replicas began with different parameters ({differs}): all take ordinal 0's")
        self._is_set_up = True
        return module

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        logged: Mapping[str, Any] | None = None,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        """Average the gradients over the replicas, update the parameters, hand the step to the device.

        Call it after as many ``backward()`` as you like: gradients are reduced once, here.

        Args:
            optimizer: holds this replica's parameters, whose gradients are ready.
            logged: values to show to listeners under their names; tensors may stay on the device.
            clip_norm: the largest norm of all averaged gradients together.
            clip_value: the largest absolute value of an averaged gradient's element.

        Raises:
            UsageError: the optimizer, at its first step, cannot train: its parameters are elsewhere, or none
                has a gradient.
        """
        self.update(optimizer, clip_norm=clip_norm, clip_value=clip_value)
        self.finish_step(logged or {})

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        """Do what `step` does but for telling listeners: `finish_step` follows, when all of it is done."""
        if not any(one is optimizer for one in self._checked):
            self._check(optimizer)
        self._replication.reduce_gradients(optimizer)
        if clip_norm is not None or clip_value is not None:
            _clip(optimizer, clip_norm, clip_value)
        optimizer.step()
        self.sync()
        self.steps += 1

    def finish_step(self, logged: Mapping[str, Any]) -> None:
        """Tell listeners that an update is made, and with it whatever else is part of the step."""
        self._plugins.hook.polyxla_step_finished(replica=self, step=self.steps, logged=logged)

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        from polyxla import agreement

        self._checked.append(optimizer)
        agreement.check_optimizer(self, optimizer)
        if not self._is_set_up:
            agreement.check_same(self, optimizer)

    def publish(self, metrics: Mapping[str, float]) -> None:
        """Tell listeners numbers that hold for all replicas, such as a validation's."""
        self._plugins.hook.polyxla_metrics_ready(replica=self, step=self.steps, metrics=metrics)

    def begin_fit(self, fit: Fit) -> None:
        """Ask the plugins for listeners to a training, and add them."""
        for listeners in self._plugins.hook.polyxla_listeners(replica=self, fit=fit):
            for listener in listeners:
                self.add_listener(listener)

    def finish_epoch(self, epoch: int) -> None:
        """Tell listeners that as many epochs are finished, their validation included."""
        self._plugins.hook.polyxla_epoch_finished(replica=self, epoch=epoch)

    def finish_fit(self) -> None:
        """Tell listeners that a training ended as it should, or because one of them stopped it."""
        self._plugins.hook.polyxla_fit_finished(replica=self)

    def sync(self, wait: bool = False) -> None:
        """Hand pending work to the device; with `wait`, return when it is done."""
        self._replication.sync(wait)
        self._is_cut = True

    def seed_everything(self, seed: int) -> None:
        """Seed this replica's random numbers: Python's, torch's, numpy's and the device's.

        From one seed every replica gets numbers of its own, and shuffled loaders made afterwards one order
        for all. Replicas that are threads share the first three with their process.
        """
        self.data_seed = seed
        if seeding.owns_host(self):
            seeding.seed_everything(seeding.derive(seed, "host", self.ordinal))
        self.seed_device(seed)

    def seed_device(self, seed: int) -> None:
        """Seed the device's random numbers, which ``torch.manual_seed`` does not reach on XLA."""
        self._replication.seed(seeding.derive(seed, "device", self.ordinal))

    def rng_state(self) -> dict[str, Any]:
        """Return where this replica's random numbers stand, as `polyxla.save` takes it."""
        host = seeding.host_state() if seeding.owns_host(self) else {}
        return {**host, "device": self._replication.rng_state()}

    def restore_rng(self, state: Mapping[str, Any]) -> None:
        """Go on with the random numbers from `rng_state`."""
        if "torch" in state:
            seeding.restore_host(state)
        self._replication.seed(state["device"])

    def gauge(self) -> Gauge | None:
        """Return what counts this replica's compilations and transfers; None where nothing can."""
        return self._replication.gauge()

    def profile(self, folder: str) -> AbstractContextManager[None]:
        """Return a context in which what the device does is traced into `folder`."""
        return self._replication.profile(folder)

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
        return combining.combined(value, op, self._replication.all_reduce, self.all_gather)

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

        Raises:
            ValueError: there is no such ordinal.
        """
        self._check_ordinal("source", source)
        return self.all_gather(value)[source]

    def _check_ordinal(self, name: str, ordinal: int) -> None:
        if not 0 <= ordinal < self.world_size:
            raise ValueError(f"{name}={ordinal} is not an ordinal: 0 <= {name} < {self.world_size}")

    def barrier(self, tag: str = "polyxla.barrier") -> None:
        """Wait until every replica is here, their pending work handed to their devices."""
        # Another replica may be reading a value that takes this one's part in a collective.
        self.sync()
        self._replication.rendezvous(tag, b"")

    def print(self, *values: Any, **options: Any) -> None:
        """Print on ordinal 0 only."""
        if self.is_first:
            builtins.print(*values, **options, flush=True)


def _clip(optimizer: torch.optim.Optimizer, norm: float | None, value: float | None) -> None:
    from torch.nn.utils import clip_grad_norm_, clip_grad_value_

    from polyxla.move import held_by

    parameters = held_by(optimizer)
    if norm is not None:
        clip_grad_norm_(parameters, norm)
    if value is not None:
        clip_grad_value_(parameters, value)
