"""What the Trainer runs in each replica. Heavy: imported there, never by `import polyxla`."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from polyxla.errors import UsageError
from polyxla.replica.loader import Loader
from polyxla.replica.module_move import held_by, move_module
from polyxla.replica.replica import Replica
from polyxla_training.fit import Fit
from polyxla_training.metrics import Meter
from polyxla_training.module_adapter import Steps, configured, own_loader
from polyxla_training.settings import FitSettings
from polyxla_training.state import Standing


@dataclass
class LoopState:
    """Where training stands; a LightningModule sees it as ``self.trainer``, and copies and pickles with it.

    Attributes:
        current_epoch: from 0.
        global_step: optimizer updates so far, as the replica counts them.
        max_epochs: passes over the training data.
        world_size: number of replicas.
        is_global_zero: whether this is ordinal 0.
        global_rank: the ordinal, under Lightning's name.
        local_rank: the local ordinal, under Lightning's name.
        estimated_stepping_batches: optimizer updates that training will make; inf where nobody knows.
        logger: None; what is logged goes to the listeners.
        progress_bar_callback: None; so ``self.print`` of a LightningModule prints plainly.
    """

    current_epoch: int
    global_step: int
    max_epochs: int
    world_size: int
    is_global_zero: bool
    global_rank: int = 0
    local_rank: int = 0
    estimated_stepping_batches: float = float("inf")
    logger: None = None
    progress_bar_callback: None = None

    @classmethod
    def at_start(cls, replica: Replica, max_epochs: int) -> Self:
        """Return the state of a training that begins in `replica`."""
        world = replica.world
        return cls(0, 0, max_epochs, world.world_size, replica.is_first, world.ordinal, world.local_ordinal)


@dataclass(frozen=True)
class Outcome:
    """What comes back from a replica.

    Attributes:
        metrics: means over all replicas' records, by name.
        stopped: why training ended before its time; empty where it did not.
        epochs: passes over the training data that were finished.
        steps: optimizer updates.
        runtime: the runtime's name.
        device: what the runtime calls the device.
        world_size: number of replicas.
        state: ordinal 0's parameters on the host; None where the caller's module was trained in place.
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
    replica: Replica, module: Any, train: Iterable[Any] | None, val: Iterable[Any] | None, how: FitSettings
) -> Outcome:
    """Train `module` in this replica; see `polyxla_training.Trainer.fit`."""
    with Loop(replica, module, how) as loop:
        train = own_loader(module, train, "train_dataloader")
        loop.fit(_required(train, "fit", "train"), own_loader(module, val, "val_dataloader"))
        return loop.finish()


def run_test(replica: Replica, module: Any, data: Iterable[Any] | None, how: FitSettings) -> Outcome:
    """Test `module` in this replica; see `polyxla_training.Trainer.test`."""
    with Loop(replica, module, how) as loop:
        data = _required(own_loader(module, data, "test_dataloader"), "test", "test")
        loop.steps.require("test")
        loop.steps.call("setup", "test", only_lightning=True)
        loop.evaluate(loop.evaluation_loader(data, "test"), "test")
        return loop.finish()


def _required(loader: Iterable[Any] | None, method: str, word: str) -> Iterable[Any]:
    if loader is None:
        raise UsageError(
            f"there is nothing to {word} on",
            where=f"Trainer.{method}",
            fix=f"Pass the {word} loader, or write {word}_dataloader in the module.",
        )
    return loader


class Loop:
    """One replica's training: the module on the device, the counters, the metrics."""

    def __init__(self, replica: Replica, module: Any, how: FitSettings) -> None:
        self.replica = replica
        self.how = how
        if how.seed is not None:
            replica.seed_everything(how.seed)
        self.in_place = os.getpid() == how.parent_pid and not replica.world.shares_process
        # Replicas that are threads would otherwise all train the caller's one module.
        private = copy.deepcopy(module) if replica.world.shares_process else module
        self._made_before = [one for one in vars(private).values() if isinstance(one, torch.optim.Optimizer)]
        self.module = replica.setup(private, *self._made_before)
        self.state = LoopState.at_start(replica, how.max_epochs)
        self.meter = Meter()
        self.steps = Steps(self.module, self.meter, self.state)
        self.metrics: dict[str, float] = {}
        self.stopped = ""
        self._micro_steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.steps.release()

    def fit(self, train: Iterable[Any], val: Iterable[Any] | None) -> None:
        """Train for the epochs asked for, validating after each."""
        self.loader = self.replica.loader(
            train, pad=self.steps.wants_valid("training"), prefetch=self.how.prefetch
        )
        per_epoch = self._steps_per_epoch()
        self.state.estimated_stepping_batches = self._expected_steps(per_epoch)
        self.steps.call("setup", "fit", only_lightning=True)
        self.optimizer, self.schedulers = configured(self.module)
        self.steps.lend_optimizer(self.optimizer, self.schedulers)
        standing = Standing(self.replica, self)
        standing.resume()
        self._listen(per_epoch, standing)
        if val is not None:
            # Before an epoch is spent on a module that cannot validate.
            self.steps.require("validation")
            val = self.evaluation_loader(val, "validation")
        self.steps.call("on_fit_start")
        self.steps.call("on_train_start")
        while self.state.current_epoch < self.how.max_epochs and not self._is_done():
            is_whole = self._epoch()
            if self.stopped:
                break
            if val is not None:
                self.evaluate(val, "validation")
            self.schedulers.epoch_finished(self.metrics)
            if is_whole:
                self.state.current_epoch += 1
                self.loader.finish_epoch()
                self.replica.hook.polyxla_epoch_finished(replica=self.replica, epoch=self.state.current_epoch)
        self.replica.hook.polyxla_fit_finished(replica=self.replica)
        self.steps.call("on_train_end")
        self.steps.call("on_fit_end")

    def evaluation_loader(self, data: Iterable[Any], kind: str) -> Loader:
        """Return `data` on the device, every record once over all replicas."""
        return self.replica.loader(
            data, pad=self.steps.wants_valid(kind), repeat=False, prefetch=self.how.prefetch
        )

    def _steps_per_epoch(self) -> int | None:
        batches = _length(self.loader)
        return None if batches is None else -(-batches // self.how.accumulate)

    def _expected_steps(self, steps_per_epoch: int | None) -> float:
        whole = float("inf") if steps_per_epoch is None else float(steps_per_epoch * self.how.max_epochs)
        return min(whole, float(self.how.max_steps or whole))

    def _listen(self, steps_per_epoch: int | None, standing: Standing) -> None:
        fit = Fit(
            settings=self.how,
            module=self.module,
            loader=self.loader,
            steps_per_epoch=steps_per_epoch,
            state_dict=standing.state_dict,
            stop=self.stop,
        )
        for listeners in self.replica.hook.polyxla_listeners(replica=self.replica, fit=fit):
            for listener in listeners:
                self.replica.add_listener(listener)

    def stop(self, reason: str) -> None:
        """End training after the step under way; every replica must say so at the same step."""
        self.stopped = reason

    def _is_done(self) -> bool:
        has_all = self.how.max_steps is not None and self.replica.steps >= self.how.max_steps
        return has_all or bool(self.stopped)

    def _epoch(self) -> bool:
        """Train for the rest of an epoch; tell whether all its batches were used."""
        self.module.train()
        self.steps.call("on_train_epoch_start")
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
                fix="Check its dataset's length, and drop_last where the batch is larger than the dataset.",
            )
        if not self.stopped:
            self.meter.end_batches()
            self.steps.call("on_train_epoch_end")
            self._publish()
        return count == expected

    def _micro_step(self, batch: Any, index: int) -> None:
        self.steps.call("on_train_batch_start", batch, index, only_lightning=True)
        if self._micro_steps == 0:
            self.optimizer.zero_grad()
        precision = self.replica.precision
        with precision.forward():
            loss = self.steps.loss(precision.inputs(batch), index, self.loader.real, self.loader.valid)
            loss = precision.loss(loss)
        (loss if self.how.accumulate == 1 else loss / self.how.accumulate).backward()
        self._loss = loss.detach()
        self._micro_steps += 1
        if self._micro_steps == self.how.accumulate:
            self._update()
        self.steps.call("on_train_batch_end", self._loss, batch, index, only_lightning=True)

    def _flush(self) -> None:
        """Make an update of the epoch's last micro-steps, where they are fewer than an update has."""
        if self._micro_steps:
            for parameter in held_by(self.optimizer):
                if parameter.grad is not None:
                    # Their mean, as in every other update.
                    parameter.grad.mul_(self.how.accumulate / self._micro_steps)
            self._update()

    def _update(self) -> None:
        self._micro_steps = 0
        how = self.how
        self.replica.update(self.optimizer, clip_norm=how.clip_norm, clip_value=how.clip_value)
        self.state.global_step = self.replica.steps
        # Before listeners hear of the step: what they save must be all of it.
        self.schedulers.step_finished()
        self.replica.finish_step({"loss": self._loss, **self.meter.latest})

    @torch.no_grad()
    def evaluate(self, loader: Loader, kind: str) -> None:
        """Run ``validation_step`` or ``test_step`` over a loader; publish what it logs."""
        self.module.eval()
        self.steps.call(f"on_{kind}_epoch_start")
        precision = self.replica.precision
        for index, batch in enumerate(loader):
            with precision.forward():
                self.steps.evaluate(kind, precision.inputs(batch), index, loader.real, loader.valid)
        self.meter.end_batches()
        self.steps.call(f"on_{kind}_epoch_end")
        self._publish()

    def _publish(self) -> None:
        means = self.meter.take(self.replica)
        if means:
            self.metrics |= means
            self.replica.hook.polyxla_metrics_ready(
                replica=self.replica, step=self.replica.steps, metrics=means
            )

    def finish(self) -> Outcome:
        """Bring the module back to the host and say what happened."""
        if self.how.strategy == "debug":
            self.replica.print(self.replica.report())
        self.module.train()
        move_module(self.module, torch.device("cpu"), self._made_before)
        carry = self.replica.is_first and not self.in_place
        return Outcome(
            metrics=self.metrics,
            epochs=self.state.current_epoch,
            steps=self.replica.steps,
            runtime=self.replica.runtime,
            device=self.replica.kind,
            world_size=self.replica.world_size,
            state=dict(self.module.state_dict()) if carry else None,
            stopped=self.stopped,
        )


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None
