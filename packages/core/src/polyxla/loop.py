"""What the Trainer runs in each replica. Heavy: imported there, never by `import polyxla`."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from polyxla.errors import UsageError
from polyxla.meters import Meter
from polyxla.module import Steps, configured, own_loader
from polyxla.move import move_module
from polyxla.progress import Progress
from polyxla.replica import Replica


@dataclass(frozen=True)
class LoopSettings:
    """What the Trainer was told, as it travels to the replicas.

    Attributes:
        max_epochs: passes over the training data.
        max_steps: optimizer updates after which training ends; None for no such limit.
        strategy: ``auto`` or ``debug``.
        log_dir: the TensorBoard folder; None for none.
        log_every_n_steps: how often logged tensors are read, which waits for the device.
        progress: whether to show progress.
        parent_pid: the launching process, to know whether its module is trained in place.
    """

    max_epochs: int
    max_steps: int | None
    strategy: str
    log_dir: str | None
    log_every_n_steps: int
    progress: bool
    parent_pid: int


@dataclass
class LoopState:
    """Where training stands; a LightningModule sees it as ``self.trainer``.

    Attributes:
        current_epoch: from 0.
        global_step: optimizer updates so far.
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


@dataclass(frozen=True)
class Outcome:
    """What comes back from a replica.

    Attributes:
        metrics: means over all replicas' records, by name.
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


def run_fit(
    replica: Replica, module: Any, train: Iterable[Any] | None, val: Iterable[Any] | None, how: LoopSettings
) -> Outcome:
    """Train `module` in this replica; see `polyxla.Trainer.fit`."""
    with Loop(replica, module, how) as loop:
        train = own_loader(module, train, "train_dataloader")
        loop.fit(_required(train, "fit", "train"), own_loader(module, val, "val_dataloader"))
        return loop.finish()


def run_test(replica: Replica, module: Any, data: Iterable[Any] | None, how: LoopSettings) -> Outcome:
    """Test `module` in this replica; see `polyxla.Trainer.test`."""
    with Loop(replica, module, how) as loop:
        data = _required(own_loader(module, data, "test_dataloader"), "test", "test")
        loop.steps.require("test")
        loop.steps.call("setup", "test", only_lightning=True)
        loop.evaluate(replica.loader(data), "test")
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

    def __init__(self, replica: Replica, module: Any, how: LoopSettings) -> None:
        self.replica = replica
        self.how = how
        self.in_place = os.getpid() == how.parent_pid and not replica.world.shares_process
        # Replicas that are threads would otherwise all train the caller's one module.
        private = copy.deepcopy(module) if replica.world.shares_process else module
        self.module = move_module(replica.precision.convert(private), replica.device)
        world = replica.world
        self.state = LoopState(
            0, 0, how.max_epochs, world.world_size, replica.is_first, world.ordinal, world.local_ordinal
        )
        self.meter = Meter()
        self.steps = Steps(self.module, self.meter, self.state)
        self.metrics: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.steps.release()

    def fit(self, train: Iterable[Any], val: Iterable[Any] | None) -> None:
        """Train for the epochs asked for, validating after each."""
        uploaded = self.replica.loader(train)
        self.state.estimated_stepping_batches = self._expected_steps(_length(uploaded))
        self.steps.call("setup", "fit", only_lightning=True)
        self.optimizer, self.schedulers = configured(self.module)
        self.steps.lend_optimizer(self.optimizer, self.schedulers)
        self._listen(uploaded)
        if val is not None:
            # Before an epoch is spent on a module that cannot validate.
            self.steps.require("validation")
            val = self.replica.loader(val)
        self.steps.call("on_fit_start")
        self.steps.call("on_train_start")
        for _ in range(self.how.max_epochs):
            self._epoch(uploaded)
            if val is not None:
                self.evaluate(val, "validation")
            self.schedulers.epoch_finished(self.metrics)
            self.state.current_epoch += 1
            if self._is_done():
                break
        self.steps.call("on_train_end")
        self.steps.call("on_fit_end")

    def _expected_steps(self, steps_per_epoch: int | None) -> float:
        whole = float("inf") if steps_per_epoch is None else float(steps_per_epoch * self.how.max_epochs)
        return min(whole, float(self.how.max_steps or whole))

    def _listen(self, train: Iterable[Any]) -> None:
        if not self.replica.is_first:
            return
        if self.how.progress:
            self.replica.add_listener(Progress(self.how, _length(train)))
        if self.how.log_dir is not None:
            from polyxla.tensorboard import TensorBoard

            self.replica.add_listener(TensorBoard(self.how.log_dir, self.how.log_every_n_steps))

    def _is_done(self) -> bool:
        return self.how.max_steps is not None and self.state.global_step >= self.how.max_steps

    def _epoch(self, uploaded: Iterable[Any]) -> None:
        self.module.train()
        self.steps.call("on_train_epoch_start")
        batches = 0
        for index, batch in enumerate(uploaded):
            self._train_batch(batch, index)
            batches += 1
            if self._is_done():
                break
        if batches == 0:
            raise UsageError(
                "the training loader gave no batch",
                where="Trainer.fit",
                fix="Check its dataset's length, and drop_last where the batch is larger than the dataset.",
            )
        self.meter.end_batches()
        self.steps.call("on_train_epoch_end")
        self._publish()

    def _train_batch(self, batch: Any, index: int) -> None:
        self.steps.call("on_train_batch_start", batch, index, only_lightning=True)
        self.optimizer.zero_grad()
        with self.replica.precision.forward():
            loss = self.steps.loss(batch, index)
        loss.backward()
        self.replica.step(self.optimizer, {"loss": loss.detach(), **self.meter.latest})
        self.schedulers.step_finished()
        self.state.global_step += 1
        self.steps.call("on_train_batch_end", loss.detach(), batch, index, only_lightning=True)

    @torch.no_grad()
    def evaluate(self, loader: Iterable[Any], kind: str) -> None:
        """Run ``validation_step`` or ``test_step`` over an uploaded loader; publish what it logs."""
        self.module.eval()
        self.steps.call(f"on_{kind}_epoch_start")
        for index, batch in enumerate(loader):
            with self.replica.precision.forward():
                self.steps.evaluate(kind, batch, index)
            self.replica.sync()
        self.meter.end_batches()
        self.steps.call(f"on_{kind}_epoch_end")
        self._publish()

    def _publish(self) -> None:
        means = self.meter.take(self.replica)
        if means:
            self.metrics |= means
            self.replica.publish(means)

    def finish(self) -> Outcome:
        """Bring the module back to the host and say what happened."""
        if self.how.strategy == "debug":
            self.replica.print(self.replica.report())
        self.module.train()
        move_module(self.module, torch.device("cpu"))
        carry = self.replica.is_first and not self.in_place
        return Outcome(
            metrics=self.metrics,
            epochs=self.state.current_epoch,
            steps=self.state.global_step,
            runtime=self.replica.runtime,
            device=self.replica.kind,
            world_size=self.replica.world_size,
            state=dict(self.module.state_dict()) if carry else None,
        )


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None
