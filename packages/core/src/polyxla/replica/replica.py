"""`Replica`: the object that a user's function receives in each replica."""

from __future__ import annotations

import builtins
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from polyxla.console import say_once
from polyxla.contracts.precision import Precision
from polyxla.contracts.replication import Counters, Replication, Sharding, World
from polyxla.errors import UsageError, pip_install
from polyxla.replica import random_state
from polyxla.replica.collectives import Collectives
from polyxla.replica.loader import Loader, ReadOptions

if TYPE_CHECKING:
    import torch

AnyModule = TypeVar("AnyModule", bound="torch.nn.Module")


class Replica(Collectives):
    """One copy of the program on one device. Belongs to one thread.

    All replicas must call the methods that involve other replicas (`step`, `setup` and the collectives), in
    the same order.

    Args:
        replication: the runtime's side.
        plugins: the plugins and listeners that receive this replica's events.
        precision: the precision policy.
        runtime: the runtime's name.

    Attributes:
        hook: calls the hooks of this replica's plugins and listeners, including other packages' hooks.
        precision: the precision policy.
        runtime: the runtime's name.
        steps: number of optimizer updates so far.
        current_loader: the loader whose batch was requested last; None before the first.
        loader_changes: number of times that a batch was requested from another loader than before.
        modules: the modules that were set up, each with whether all replicas train the same parameters.
        data_seed: seed of the order of shuffled records; the same in every replica.
        data_world: this replica's numbers among those that receive different records.
        sharding: how the replicas divide their modules' parameters; None if each has all of them.
    """

    def __init__(
        self, replication: Replication, plugins: pluggy.PluginManager, precision: Precision, runtime: str
    ) -> None:
        super().__init__(replication)
        self.hook: pluggy.HookRelay = plugins.hook
        self.precision = precision
        self.runtime = runtime
        self.steps = 0
        self.current_loader: Loader | None = None
        self.loader_changes = 0
        # Weak, so that a module that the function drops is freed.
        self.modules: MutableMapping[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
        self.data_seed = 0
        self.data_world: World = replication.world
        self.sharding: Sharding | None = None
        self._has_loaders = False
        self._plugins = plugins
        self._is_synced = False
        self._checked: list[Any] = []

    # Type checkers would take every name for an attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Say what an attribute of Lightning's Fabric or of Accelerate is called here."""
            from polyxla.replica.other_names import OTHER_NAMES

            instead = f": write {OTHER_NAMES[name]}" if name in OTHER_NAMES else ""
            text = f"{type(self).__name__!r} object has no attribute {name!r}{instead}"
            raise AttributeError(text, name=name, obj=self)

    def add_listener(self, listener: object) -> None:
        """Register an object whose methods implement hooks (`polyxla.hookimpl`).

        Raises:
            BrokenPluginError: the listener is registered already, or does not match the hook specs.
        """
        self._plugins.register(listener)

    def loader(
        self,
        loader: Iterable[Any],
        *,
        pad: bool = False,
        repeat: bool = True,
        divided: bool = False,
        prefetch: Mapping[str, int] | None = None,
        transfer: Callable[[Any], Any] | None = None,
    ) -> Loader:
        """Return a loader of this replica's records, with its batches on the device.

        Requesting a batch submits pending work to the device, unless that happened since the previous batch.

        Args:
            loader: a DataLoader, or any other iterable.
            pad: give every batch the shape of a full one, so that an epoch compiles one program.
                `Loader.valid` marks the real records.
            repeat: repeat records until every replica has the same number of them, as training requires. If
                False, repeats are left out, or masked with `pad`, so that metrics are exact. After `setup`
                with a mesh, a batch of repeats arrives too, and `Loader.is_repeat` tells it.
            divided: whether the loader has this replica's records only, because you have divided them. Give
                every replica the same number of batches. The usual ways to divide are recognised without it.
            prefetch: how far to copy ahead, by the runtime's option names: on torch_xla
                ``loader_prefetch_size``, ``device_prefetch_size`` and ``host_to_device_transfer_threads``.
            transfer: returns a batch of any type on the device, in the loop's thread; nothing is read ahead.

        Raises:
            UsageError: there are several replicas and no plugin can divide the records among them.
        """
        self._has_loaders = True
        # A loader that is divided already is read as if the replica were alone.
        world = World() if divided else self.data_world
        shard: Iterable[Any] | None = self.hook.polyxla_shard_loader(
            loader=loader, world=world, seed=self.data_seed, repeat=repeat
        )
        if shard is None and world.world_size > 1:
            raise UsageError(
                f"no installed plugin can divide the records of {type(loader).__name__} "
                f"among {world.world_size} replicas; all of them would train on the same records",
                fix=f"Install one ({pip_install('polyxla-sampler')}), or divide them yourself and write "
                "replica.loader(loader, divided=True).",
            )
        note = getattr(shard, "note", "")
        if divided:
            note = f"{type(loader).__name__}: each replica reads its own records, as divided=True says"
        # One replica reads everything: nothing was divided, so there is nothing to announce.
        if self.data_world.world_size > 1 and self.is_first and note:
            say_once(note)
        # Replicas that share a module's parameters must use it equally often.
        options = ReadOptions(pad, self.sharding is not None, prefetch or {}, transfer)
        source = loader if shard is None else shard
        parts = self.data_world.world_size if divided else None
        return Loader(source, options, self._replication, self._before_batch, parts)

    def _before_batch(self, loader: Loader) -> None:
        if loader is not self.current_loader:
            self.current_loader = loader
            self.loader_changes += 1
        # A plain loop that never steps would otherwise trace all its batches into one program.
        if not self._is_synced:
            self.sync()
        self._is_synced = False

    def setup(
        self,
        module: AnyModule,
        *optimizers: torch.optim.Optimizer,
        same: bool = True,
        mesh: Mapping[str, int] | None = None,
    ) -> AnyModule:
        """Move `module` to the device, in the precision policy's dtypes.

        Tied parameters stay tied. If the replicas' parameters differ, all take ordinal 0's and a warning is
        printed.

        Args:
            module: moved in place.
            optimizers: optimizers of its parameters; afterwards they hold the moved parameters.
            same: whether all replicas train the same parameters. False lets each keep its own; update those
                with ``optimizer.step()``, because `step` averages gradients.
            mesh: size of each dimension by the name of what it divides, such as ``{"fsdp": 4}`` or
                ``{"fsdp": 2, "tp-plan": 2}``, as in docs/sharding.md; default: every replica has all of the
                parameters. Parameters on the meta device are initialised.

        Returns:
            `module` itself, unless the policy replaces it.

        Raises:
            UsageError: a lazy layer has no parameters yet, or an optimizer holds a parameter of another
                module, in which cases `module` is unchanged; or the policy refuses the module; or it cannot
                be divided over `mesh`.
        """
        from polyxla.replica import consistency
        from polyxla.replica.module_move import check_initialized, check_owner, move_module

        check_initialized(module)
        # Before the policy converts the module: a refused module stays as it was.
        check_owner(module, optimizers)
        is_made = not any(parameter.is_meta for parameter in module.parameters())
        # Before the policy converts the module: rounding could hide a difference.
        mismatch = consistency.find_mismatch(self, module) if same and is_made else ""
        try:
            converted: Any = self.precision.convert_module(module)
        except ValueError as error:
            raise UsageError(
                str(error),
                where=f"precision {self.precision.name}",
                fix="Change the policy's arguments, or choose another policy.",
            ) from error
        module = converted
        if mesh is not None:
            self._shard(module, optimizers, mesh, take_first=bool(mismatch))
        else:
            move_module(module, self.device, optimizers)
            if mismatch:
                consistency.broadcast(self, [*module.parameters(), *module.buffers()])
        if mismatch and self.is_first:
            say_once(f"replicas began with different parameters ({mismatch}): all take ordinal 0's")
        self.modules[module] = same
        return module

    def _shard(
        self,
        module: torch.nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...],
        mesh: Mapping[str, int],
        take_first: bool,
    ) -> None:
        sharding: Sharding | None = self.hook.polyxla_shard_module(
            replica=self, module=module, optimizers=optimizers, mesh=mesh, take_first=take_first
        )
        if sharding is None:
            raise UsageError(
                "no installed plugin can divide a module among replicas",
                where="replica.setup(mesh=...)",
                fix=f"Install one ({pip_install('polyxla-training')}), or leave mesh out.",
            )
        if self.sharding is None and sharding.data_world != self.data_world:
            if self._has_loaders:
                raise UsageError(
                    "a loader was made before: its replicas read different records, and those that compute "
                    "the same records together need the same ones",
                    where=f"replica.setup(mesh={dict(mesh)})",
                    fix="Call replica.setup before replica.loader.",
                )
            self.data_world = sharding.data_world
            # Replicas that compute the same records draw the same numbers from now on, as for dropout.
            self.seed_everything(self.data_seed)
        self.sharding = sharding

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        logged: Mapping[str, Any] | None = None,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        """Average the gradients over the replicas, update the parameters and submit the step to the device.

        Call it after any number of ``backward()`` calls: gradients are reduced once, here. Replicas may use
        different parameters: where one has no gradient, it counts as zero.

        Args:
            optimizer: updates this replica's parameters, whose gradients are ready.
            logged: values for the listeners, by name; tensors may stay on the device.
            clip_norm: maximum norm of all averaged gradients together; None: no limit.
            clip_value: maximum absolute value of each element of the averaged gradients; None: no limit.

        Raises:
            UsageError: at its first step, the optimizer cannot train: its parameters are on another device,
                or none has a gradient.
        """
        self.update(optimizer, clip_norm=clip_norm, clip_value=clip_value)
        self.finish_step(logged or {})

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        before_step: Callable[[], object] = lambda: None,
    ) -> None:
        """Perform `step` without notifying the listeners; call `finish_step` once the whole step is done.

        Args:
            optimizer: as for `step`.
            clip_norm: as for `step`.
            clip_value: as for `step`.
            before_step: called with the averaged gradients in place, before they are clipped.

        Raises:
            UsageError: as for `step`.
        """
        from polyxla.replica import consistency

        # By identity: an optimizer may define equality.
        is_first = not any(checked is optimizer for checked in self._checked)
        if is_first:
            self._check(optimizer)
        self._reduce_gradients(optimizer)
        if is_first:
            # Only after averaging: a single replica may have used no parameter.
            consistency.check_gradients(optimizer)
        before_step()
        if clip_norm is not None or clip_value is not None:
            self.clip(optimizer, clip_norm, clip_value)
        with self._replication.optimizer_context(optimizer):
            optimizer.step()
        self.sync()
        self.steps += 1

    def _reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        from polyxla.replica import consistency
        from polyxla.replica.module_move import optimizer_parameters

        if self.sharding is not None:
            unused = self.sharding.reduce_gradients(optimizer)
        elif self.world_size > 1:
            parameters = optimizer_parameters(optimizer)
            unused = consistency.average_gradients(parameters, self._replication.average, self.sync)
        else:
            return
        if unused and self.is_first:
            say_once(
                "some parameters have no gradient in any replica, and each step waits for the device to find "
                "that out: call requires_grad_(False) on those that are never trained"
            )

    def clip(
        self, optimizer: torch.optim.Optimizer, norm: float | None = None, value: float | None = None
    ) -> None:
        """Limit the averaged gradients, which may be divided among the replicas; `step` does it too.

        Args:
            optimizer: holds the parameters.
            norm: maximum norm of all gradients together; None: no limit.
            value: maximum absolute value of each element; None: no limit.
        """
        if self.sharding is not None:
            self.sharding.clip(optimizer, norm, value)
            return
        from torch.nn.utils import clip_grad_norm_, clip_grad_value_

        from polyxla.replica.module_move import optimizer_parameters

        parameters = optimizer_parameters(optimizer)
        if norm is not None:
            clip_grad_norm_(parameters, norm)
        if value is not None:
            clip_grad_value_(parameters, value)

    def finish_step(self, logged: Mapping[str, Any]) -> None:
        """Notify the listeners that the step is done.

        Args:
            logged: values for the listeners, by name; tensors may stay on the device.
        """
        self.hook.polyxla_step_finished(replica=self, step=self.steps, logged=logged)

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        from polyxla.replica import consistency

        self._checked.append(optimizer)
        consistency.check_optimizer(self, optimizer)
        if not self.modules:
            consistency.check_same(self, optimizer)

    def sync(self, wait: bool = False) -> None:
        """Submit pending work to the device; with `wait`, block until it is done."""
        super().sync(wait)
        self._is_synced = True

    def seed_everything(self, seed: int) -> None:
        """Seed this replica's random numbers: Python's, torch's, numpy's and the device's.

        Pass the same seed in every replica. Each replica then draws different numbers, and loaders made
        afterwards shuffle in one order for all. Replicas that are threads of one process share Python's,
        torch's and numpy's generators.
        """
        self.data_seed = seed
        if self.world.owns_process:
            random_state.seed_everything(random_state.derive(seed, "host", self.data_world.ordinal))
        self.seed_device(seed)

    def seed_device(self, seed: int) -> None:
        """Seed the device's random numbers, which ``torch.manual_seed`` does not reach on XLA."""
        self._replication.seed(random_state.derive(seed, "device", self.data_world.ordinal))

    def rng_state(self) -> dict[str, Any]:
        """Return the state of this replica's generators, as a pytree that `polyxla_training.save` accepts."""
        host = random_state.host_state() if self.world.owns_process else {}
        return {**host, "device": self._replication.rng_state()}

    def restore_rng(self, state: Mapping[str, Any]) -> None:
        """Restore this replica's generators to a state that `rng_state` returned."""
        if "torch" in state:
            random_state.restore_host_state(state)
        self._replication.seed(state["device"])

    def counters(self) -> Counters | None:
        """Return this replica's counters of compilations and transfers; None if the runtime has none."""
        return self._replication.counters()

    def profile(self, folder: str) -> AbstractContextManager[Callable[[int], None]]:
        """Return a context in which the device's work is traced into the directory `folder`.

        Its value is a function that takes a number and begins the step with that number in the trace.

        Raises:
            UsageError: the runtime has no profiler.
        """
        return self._replication.profile(folder)

    def report(self) -> str:
        """Return the runtime's report on compilations, executions and transfers."""
        return self._replication.report()

    def print(self, *values: Any, **options: Any) -> None:
        """Print on ordinal 0 only; arguments as for Python's ``print``."""
        if self.is_first:
            # Flushed, because replicas often end by a signal or os._exit, which write no buffers.
            builtins.print(*values, **{"flush": True, **options})
