"""The training loop that the Trainer runs in each replica. Heavy: imported there only."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from polyxla.errors import UsageError
from polyxla.replica.loader import Loader
from polyxla.replica.module_move import move_module, optimizer_parameters
from polyxla.replica.replica import Replica
from polyxla_training.metrics import MetricAccumulator
from polyxla_training.module_adapter import ModuleAdapter, configure_optimizers, resolve_loader
from polyxla_training.options import Fit, FitOptions
from polyxla_training.state import TrainingState
from polyxla_training.trainer_view import TrainerView


@dataclass(frozen=True)
class Outcome:
    """The result of a run, as a replica returns it.

    Attributes:
        metrics: means over all replicas' records, by name.
        epochs: number of finished passes over the training data.
        steps: number of optimizer updates.
        runtime: name of the runtime.
        device: the runtime's name for the device.
        world_size: number of replicas.
        state: the trained parameters on the host, from one replica for each process that called the Trainer;
            None from the others, and if the caller's own module was trained.
        stopped: why training ended early; empty if it did not.
    """

    metrics: dict[str, float]
    epochs: int
    steps: int
    runtime: str
    device: str
    world_size: int
    state: dict[str, Any] | None = field(default=None, repr=False)
    stopped: str = ""


def run_fit(
    replica: Replica,
    module: Any,
    train: Iterable[Any] | None,
    val: Iterable[Any] | None,
    options: FitOptions,
    caller_pid: int,
) -> Outcome:
    """Train `module` in this replica; see `polyxla_training.Trainer.fit`."""
    with TrainingLoop(replica, module, options, caller_pid) as loop:
        train = resolve_loader(module, train, "train_dataloader")
        loop.fit(_required(train, "fit", "train"), resolve_loader(module, val, "val_dataloader"))
        return loop.finish()


def run_test(
    replica: Replica, module: Any, data: Iterable[Any] | None, options: FitOptions, caller_pid: int
) -> Outcome:
    """Test `module` in this replica; see `polyxla_training.Trainer.test`."""
    with TrainingLoop(replica, module, options, caller_pid) as loop:
        data = _required(resolve_loader(module, data, "test_dataloader"), "test", "test")
        loop.adapter.require("test")
        loop.adapter.call("setup", "test", only_lightning=True)
        loop.evaluate(loop.evaluation_loader(data, "test"), "test")
        return loop.finish()


def _required(loader: Iterable[Any] | None, method: str, kind: str) -> Iterable[Any]:
    if loader is None:
        raise UsageError(
            f"there is nothing to {kind} on",
            where=f"Trainer.{method}",
            fix=f"Pass the {kind} loader, or write {kind}_dataloader in the module.",
        )
    return loader


class TrainingLoop:
    """One replica's training: the module on the device, the counters, the metrics.

    Args:
        replica: the replica to train in.
        module: the caller's module, or this process's copy of it.
        options: the Trainer's options.
        caller_pid: id of the process that called the Trainer.
    """

    def __init__(self, replica: Replica, module: Any, options: FitOptions, caller_pid: int) -> None:
        self.replica = replica
        self.options = options
        if options.seed is not None:
            replica.seed_everything(options.seed)
        # Replicas that are threads received the one module of the caller: each trains a copy.
        private = copy.deepcopy(module) if replica.world.shares_process else module
        self._caller_pid = caller_pid
        self._is_callers = os.getpid() == caller_pid and not replica.world.shares_process
        # Optimizers that the module made in __init__ hold its parameters, which move with it.
        self._own_optimizers = [
            one for one in vars(private).values() if isinstance(one, torch.optim.Optimizer)
        ]
        self.module = replica.setup(private, *self._own_optimizers)
        self.view = TrainerView.at_start(replica, options.max_epochs)
        self.accumulator = MetricAccumulator()
        self.adapter = ModuleAdapter(self.module, self.accumulator, self.view)
        self.metrics: dict[str, float] = {}
        self.stopped = ""
        self._micro_steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.adapter.release()

    def fit(self, train: Iterable[Any], val: Iterable[Any] | None) -> None:
        """Train for the requested epochs, and validate after each."""
        self._prepare(train)
        if val is not None:
            # Refused here, before an epoch is spent on a module that cannot validate.
            self.adapter.require("validation")
            val = self.evaluation_loader(val, "validation")
        self.adapter.call("on_fit_start")
        self.adapter.call("on_train_start")
        while self.view.current_epoch < self.options.max_epochs and not self._is_done():
            is_whole = self._epoch()
            if self.stopped:
                break
            if val is not None:
                self.evaluate(val, "validation")
            self.schedulers.epoch_finished(self.metrics)
            if is_whole:
                self._finish_epoch()
        self.replica.hook.polyxla_fit_finished(replica=self.replica)
        self.adapter.call("on_train_end")
        self.adapter.call("on_fit_end")

    def _prepare(self, train: Iterable[Any]) -> None:
        """Make the loader and the optimizer, resume, and let plugins add listeners, in this order."""
        self.loader = self.replica.loader(
            train, pad=self.adapter.accepts_mask("training"), prefetch=self.options.prefetch
        )
        steps_per_epoch = self._steps_per_epoch()
        # A LightningModule's setup and configure_optimizers read this.
        self.view.estimated_stepping_batches = self._expected_steps(steps_per_epoch)
        self.adapter.call("setup", "fit", only_lightning=True)
        self.optimizer, self.schedulers = configure_optimizers(self.module)
        self.adapter.lend_optimizer(self.optimizer, self.schedulers)
        state = TrainingState(
            self.replica,
            self.module,
            self.optimizer,
            self.schedulers,
            self.loader,
            self.accumulator,
            self.view,
            self.options.seed,
        )
        if self.options.resume is not None:
            state.resume(self.options.resume, self.options.checkpoint_dir)
        # Listeners come after resuming: they read the step that training begins at.
        fit = Fit(self.options, self.module, steps_per_epoch, state.state_dict, self.stop)
        for listeners in self.replica.hook.polyxla_listeners(replica=self.replica, fit=fit):
            for listener in listeners:
                self.replica.add_listener(listener)

    def evaluation_loader(self, data: Iterable[Any], kind: str) -> Loader:
        """Return a loader of `data` on the device: every record once over all replicas."""
        return self.replica.loader(
            data, pad=self.adapter.accepts_mask(kind), repeat=False, prefetch=self.options.prefetch
        )

    def _steps_per_epoch(self) -> int | None:
        batches = _length(self.loader)
        return None if batches is None else -(-batches // self.options.accumulate)

    def _expected_steps(self, steps_per_epoch: int | None) -> float:
        epochs = self.options.max_epochs
        whole = float("inf") if steps_per_epoch is None else float(steps_per_epoch * epochs)
        return min(whole, float(self.options.max_steps or whole))

    def stop(self, reason: str) -> None:
        """End training after the current step; every replica must call it at the same step."""
        self.stopped = reason

    def _is_done(self) -> bool:
        limit = self.options.max_steps
        return bool(self.stopped) or (limit is not None and self.replica.steps >= limit)

    def _epoch(self) -> bool:
        """Train for the rest of an epoch; return whether all its batches were used."""
        self.module.train()
        self.adapter.call("on_train_epoch_start")
        # A resumed run has consumed some batches of this epoch already; indices count on from them.
        before, expected = self.loader.batches_before, _length(self.loader)
        count = 0
        for count, batch in enumerate(self.loader, start=1):
            self._micro_step(batch, before + count - 1)
            if self._is_done():
                break
        else:
            expected = count
            self._flush()
        if before + count == 0:
            raise UsageError(
                "the training loader gave no batch",
                where="Trainer.fit",
                fix="Check its dataset's length, and drop_last if the batch is larger than the dataset.",
            )
        if not self.stopped:
            self.accumulator.end_batches()
            self.adapter.call("on_train_epoch_end")
            self._publish()
        return count == expected

    def _finish_epoch(self) -> None:
        self.view.current_epoch += 1
        self.loader.finish_epoch()
        self.replica.hook.polyxla_epoch_finished(replica=self.replica, epoch=self.view.current_epoch)

    def _micro_step(self, batch: Any, index: int) -> None:
        self.adapter.call("on_train_batch_start", batch, index, only_lightning=True)
        if self._micro_steps == 0:
            self.optimizer.zero_grad()
        precision = self.replica.precision
        with precision.forward_context():
            loss = self.adapter.loss(
                precision.convert_input(batch), index, self.loader.real, self.loader.valid
            )
            loss = precision.convert_output(loss)
        (loss if self.options.accumulate == 1 else loss / self.options.accumulate).backward()
        self._loss = loss.detach()
        self._micro_steps += 1
        if self._micro_steps == self.options.accumulate:
            self._update()
        self.adapter.call("on_train_batch_end", self._loss, batch, index, only_lightning=True)

    def _flush(self) -> None:
        """Make an update from the epoch's last micro-steps, if they are fewer than a whole update has."""
        if self._micro_steps:
            for parameter in optimizer_parameters(self.optimizer):
                if parameter.grad is not None:
                    # Each was divided by `accumulate`; the mean of those that there are has to be larger.
                    parameter.grad.mul_(self.options.accumulate / self._micro_steps)
            self._update()

    def _update(self) -> None:
        self._micro_steps = 0
        options = self.options
        self.replica.update(self.optimizer, clip_norm=options.clip_norm, clip_value=options.clip_value)
        self.view.global_step = self.replica.steps
        # Before listeners receive the step: a checkpoint that they save must have all of it.
        self.schedulers.step_finished()
        self.replica.finish_step({"loss": self._loss, **self.accumulator.latest})

    @torch.no_grad()
    def evaluate(self, loader: Loader, kind: str) -> None:
        """Run ``validation_step`` or ``test_step`` over a loader, and publish the logged means."""
        self.module.eval()
        self.adapter.call(f"on_{kind}_epoch_start")
        precision = self.replica.precision
        for index, batch in enumerate(loader):
            with precision.forward_context():
                self.adapter.evaluate(kind, precision.convert_input(batch), index, loader.real, loader.valid)
        self.accumulator.end_batches()
        self.adapter.call(f"on_{kind}_epoch_end")
        self._publish()

    def _publish(self) -> None:
        means = self.accumulator.take(self.replica)
        if means:
            self.metrics |= means
            self.replica.hook.polyxla_metrics_ready(
                replica=self.replica, step=self.replica.steps, metrics=means
            )

    def finish(self) -> Outcome:
        """Move the module back to the host and return the result."""
        if self.options.strategy == "debug":
            self.replica.print(self.replica.report())
        self.module.train()
        move_module(self.module, torch.device("cpu"), self._own_optimizers)
        return Outcome(
            metrics=self.metrics,
            epochs=self.view.current_epoch,
            steps=self.replica.steps,
            runtime=self.replica.runtime,
            device=self.replica.kind,
            world_size=self.replica.world_size,
            state=dict(self.module.state_dict()) if self._returns_state() else None,
            stopped=self.stopped,
        )

    def _returns_state(self) -> bool:
        """Return whether this is the one replica whose parameters the calling process receives.

        Not ordinal 0: on a pod every host has a caller, and only one host has ordinal 0. A process that
        torchrun started receives the results of its own replicas only.
        """
        world = self.replica.world
        runs_in_caller = os.getpid() == self._caller_pid
        is_first_of_caller = world.local_ordinal == 0 or (runs_in_caller and world.owns_process)
        return is_first_of_caller and not self._is_callers


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None
