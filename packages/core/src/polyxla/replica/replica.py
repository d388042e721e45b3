"""`Replica`: the object that a user's function receives in each replica."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pluggy

from polyxla.console import say_once
from polyxla.contracts.counters import Counters
from polyxla.contracts.precision import Precision
from polyxla.contracts.replication import Replication
from polyxla.errors import UsageError
from polyxla.replica import random_state
from polyxla.replica.collectives import Collectives
from polyxla.replica.host_batches import Reading
from polyxla.replica.loader import Loader

if TYPE_CHECKING:
    import torch


class Replica(Collectives):
    """One copy of the program on one device.

    Methods that involve other replicas (`step`, `setup` and the collectives of `Collectives`) must be called
    by all of them, in the same order. Belongs to one thread.

    Args:
        replication: the runtime's side.
        plugins: the plugins and listeners that receive this replica's events.
        precision: the policy in force.
        runtime: the runtime's name.

    Attributes:
        steps: optimizer updates so far.
        input: the loader whose batch was requested last; None before the first.
        data_seed: seed of the order of shuffled records; the same in every replica.
    """

    def __init__(
        self, replication: Replication, plugins: pluggy.PluginManager, precision: Precision, runtime: str
    ) -> None:
        super().__init__(replication)
        self.precision = precision
        self.runtime = runtime
        self.steps = 0
        self.input: Loader | None = None
        self.data_seed = 0
        self._plugins = plugins
        self._is_cut = False
        self._is_set_up = False
        # The optimizers that were checked, kept so that no other object gets the id of one of them.
        self._checked: list[Any] = []

    @property
    def hook(self) -> pluggy.HookRelay:
        """The hooks of this replica's plugins and listeners, for packages with events of their own."""
        return self._plugins.hook

    def add_listener(self, listener: object) -> None:
        """Register an object whose methods implement hooks (`polyxla.hookimpl`).

        Raises:
            BrokenPluginError: it is registered already, or does not match the hook specs.
        """
        self._plugins.register(listener)

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
        from polyxla.replica import consistency
        from polyxla.replica.module_move import check_owner, move_module

        # Before a policy changes a module that is then refused.
        check_owner(module, optimizers)
        differs = consistency.differing(self, module)
        try:
            module = self.precision.convert(module)
        except ValueError as error:
            raise UsageError(
                str(error), where=f"precision {self.precision.name}", fix="Change what the policy is told."
            ) from error
        move_module(module, self.device, optimizers)
        if differs:
            consistency.take_from_first(self, module)
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
        from polyxla.replica import consistency

        self._checked.append(optimizer)
        consistency.check_optimizer(self, optimizer)
        if not self._is_set_up:
            consistency.check_same(self, optimizer)

    def sync(self, wait: bool = False) -> None:
        """Submit pending work to the device; with `wait`, block until it is done."""
        super().sync(wait)
        self._is_cut = True

    def seed_everything(self, seed: int) -> None:
        """Seed this replica's random numbers: Python's, torch's, numpy's and the device's.

        From one seed every replica gets numbers of its own, and shuffled loaders made afterwards one order
        for all. Replicas that are threads share the first three with their process.
        """
        self.data_seed = seed
        if self.world.owns_process:
            random_state.seed_everything(random_state.derive(seed, "host", self.ordinal))
        self.seed_device(seed)

    def seed_device(self, seed: int) -> None:
        """Seed the device's random numbers, which ``torch.manual_seed`` does not reach on XLA."""
        self._replication.seed(random_state.derive(seed, "device", self.ordinal))

    def rng_state(self) -> dict[str, Any]:
        """Return where this replica's random numbers stand, as `polyxla_training.save` takes it."""
        host = random_state.host_state() if self.world.owns_process else {}
        return {**host, "device": self._replication.rng_state()}

    def restore_rng(self, state: Mapping[str, Any]) -> None:
        """Go on with the random numbers from `rng_state`."""
        if "torch" in state:
            random_state.restore_host(state)
        self._replication.seed(state["device"])

    def counters(self) -> Counters | None:
        """Return this replica's counters of compilations and transfers; None if the runtime has none."""
        return self._replication.counters()

    def profile(self, folder: str) -> AbstractContextManager[None]:
        """Return a context in which what the device does is traced into `folder`."""
        return self._replication.profile(folder)

    def report(self) -> str:
        """Return the runtime's own account of compilations, executions and transfers."""
        return self._replication.report()

    def print(self, *values: Any, **options: Any) -> None:
        """Print on ordinal 0 only."""
        if self.is_first:
            builtins.print(*values, **options, flush=True)


def _clip(optimizer: torch.optim.Optimizer, norm: float | None, value: float | None) -> None:
    from torch.nn.utils import clip_grad_norm_, clip_grad_value_

    from polyxla.replica.module_move import held_by

    parameters = held_by(optimizer)
    if norm is not None:
        clip_grad_norm_(parameters, norm)
    if value is not None:
        clip_grad_value_(parameters, value)
