"""The workspace of one replica in a call of the Trainer: the module on the device, its data, its metrics."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from typing import Any, Self

import torch

from polyxla import Replica, UsageError
from polyxla.plugin import Loader, move_module
from polyxla_training.lightning.callbacks import LightningCallbacks, is_callback
from polyxla_training.lightning.data import Data
from polyxla_training.lightning.trainer_view import TrainerView
from polyxla_training.loop.call import TrainerCall, TrainerOutcome
from polyxla_training.metrics import MetricAccumulator
from polyxla_training.module_adapter import ModuleAdapter
from polyxla_training.progress import Progress, batch_limit, count_batches, length_of
from polyxla_training.resume import Checkpoint, find_checkpoint
from polyxla_training.shared_directory import check_shared

_SHORT = {"training": "train", "validation": "val", "test": "test", "predict": "predict"}
"""The kinds of steps, as the names of loaders and of limits have them."""


class Workspace:
    """One replica's module, data and metrics, from the call of the Trainer until its outcome.

    A context manager, which takes back what the module and the data module are lent.

    Args:
        replica: the replica.
        call: what to do.

    Attributes:
        options: the Trainer's options.
        module: the module, after `set_up` on the device.
        adapter: calls its hooks.
        data: its data.
        metrics: what it logs.
        progress: how far the loop has come.
        view: what the module sees as ``self.trainer``.
        callbacks: the objects of ``Trainer(callbacks=...)``.
        checkpoint: the checkpoint to resume from; None if there is none.
        predictions: what ``predict_step`` has returned, on the host.
    """

    def __init__(self, replica: Replica, call: TrainerCall) -> None:
        self.replica, self.call, self.options = replica, call, call.options
        # Seeded before anything is made: copies, workers and layers may draw random numbers.
        if self.options.seed is not None:
            replica.seed_everything(self.options.seed)
        self.module, datamodule, self.callbacks = _own_objects(replica, call)
        self.progress = Progress()
        self.metrics = MetricAccumulator(replica)
        self.view = TrainerView(replica.world, self.options, self.progress, datamodule)
        self._lightning = LightningCallbacks(filter(is_callback, self.callbacks), self.view)
        self.view.callbacks = self._lightning.callbacks
        self.adapter = ModuleAdapter(self.module, self.metrics, self.view, self._lightning)
        self.data = Data(replica, self.module, datamodule, call.stage, self.view, self._lightning)
        self.checkpoint: Checkpoint | None = None
        self.predictions: list[Any] = []
        self._own_optimizers: list[torch.optim.Optimizer] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.adapter.release()
        self.data.release()

    def set_up(self) -> None:
        """Prepare the data, complete the module, read the checkpoint, and move the module to the device.

        Raises:
            UsageError: the hosts do not share the directory of the checkpoints.
        """
        is_fit, directory = self.call.stage == "fit", self.options.checkpoint_dir
        if is_fit and directory is not None:
            # Checked first: preparing the data may take long.
            check_shared(self.replica, directory, f"checkpoint_dir={os.fspath(directory)!r}")
        # Hooks of the setup may use self.device and self.all_gather.
        self.adapter.lend_replica(self.replica)
        self.adapter.configure_callbacks()
        self.data.prepare()
        self.data.set_up()
        self.adapter.call("configure_sharded_model")
        self.adapter.call("configure_model")
        if is_fit and self.options.resume is not None:
            in_shards = self.options.mesh is not None
            self.checkpoint = find_checkpoint(
                self.replica, self.options.resume, directory, in_shards=in_shards
            )
        if self.checkpoint is not None:
            # Before the loaders are made, which may depend on it.
            self.data.load_state_dict(self.checkpoint.state["datamodule"])
            # Before the move, so that the hook sees and changes tensors on the host.
            self.checkpoint.pass_to(self.adapter.hook("on_load_checkpoint"))
        # Optimizers that the module made before the move hold its parameters, which move with it.
        self._own_optimizers = self.adapter.own_optimizers()
        moved = self.replica.setup(self.module, *self._own_optimizers, mesh=self.options.mesh)
        if moved is not self.module:
            # The precision policy has wrapped the module: lend the wrapper what the module was lent.
            self.adapter.release()
            self.module = moved
            self.adapter = ModuleAdapter(moved, self.metrics, self.view, self._lightning)

    def load(self, data: Iterable[Any] | None, kind: str) -> Loader:
        """Return a loader of `data` on the device: in an evaluation, every record once over all replicas.

        Args:
            data: the batches; None if there are none.
            kind: ``training``, ``validation``, ``test`` or ``predict``.

        Raises:
            UsageError: there is no batch.
        """
        if data is None:
            short = _SHORT[kind]
            raise UsageError(
                f"there is nothing to {'train' if kind == 'training' else self.call.stage} on",
                where=f"Trainer.{self.call.stage}",
                fix=f"Pass the {short} loader, or write {short}_dataloader in the module.",
            )
        if kind != "predict" and length_of(data) == 0:
            raise no_batch(kind)
        # A step that takes the mask gets whole batches, which share one program; others get the last batch
        # as it is.
        pad, is_training = self.adapter.accepts_mask(kind), kind == "training"
        return self.data.load(data, pad=pad, repeat=is_training, prefetch=self.options.prefetch)

    def batches_of(self, loader: Loader, kind: str) -> int | None:
        """Return how many batches of a loader are read; None for all of one without a length."""
        return count_batches(length_of(loader), self.options, f"limit_{_SHORT[kind]}_batches")

    def limit_of(self, loader: Loader, kind: str) -> int | None:
        """Return how many batches of a loader may be read; None for all.

        Not the loader's length: each worker of an iterable dataset may end with a batch that is not full.
        """
        return batch_limit(length_of(loader), self.options, f"limit_{_SHORT[kind]}_batches")

    def publish(self) -> None:
        """Compute the means of what was logged, and pass them to the listeners. A collective."""
        means = self.metrics.take(self.replica)
        self.progress.means |= means
        if means:
            shown = self.metrics.without_hidden(means)
            hidden = {name: mean for name, mean in means.items() if name not in shown}
            self.replica.hook.polyxla_metrics_ready(
                replica=self.replica, step=self.replica.steps, metrics=shown, hidden=hidden
            )

    def finish(self) -> TrainerOutcome:
        """Move the module back to the host and return the result."""
        replica = self.replica
        if self.options.strategy == "debug":
            replica.print(replica.report())
        if self.options.mesh is None:
            # In place: the caller's own module may be this one, and its optimizers hold its parameters.
            move_module(self.module, torch.device("cpu"), self._own_optimizers)
        if self.call.stage == "fit":
            self.adapter.call_last("on_fit_end")
        state = self._state_for_caller()
        self.data.tear_down()
        return TrainerOutcome(
            metrics=self.progress.means,
            epochs=self.progress.epoch,
            steps=replica.steps,
            runtime=replica.runtime,
            device=replica.kind,
            world_size=replica.world_size,
            state=state,
            stopped=self.progress.stopped,
            predictions=self.predictions,
            data_ordinal=replica.data_world.ordinal,
        )

    def _state_for_caller(self) -> dict[str, Any] | None:
        """Return the module's state if the calling process receives it from this replica."""
        is_wanted = self.call.returns_state(self.replica.world)
        if self.options.mesh is None:
            return dict(self.module.state_dict()) if is_wanted else None
        from polyxla_training.sharding.sharded_state import gathered

        # A collective: replicas that return nothing take part too.
        state = gathered(dict(self.module.state_dict()), keep=is_wanted)
        return state if is_wanted else None


def _own_objects(replica: Replica, call: TrainerCall) -> tuple[Any, Any, Any]:
    """Return the module, the data module and the callbacks that this replica may change."""
    received = (call.module, call.datamodule, call.options.callbacks)
    if replica.world.shares_process:
        # Replicas that are threads received the one module of the caller: each trains a copy. The three are
        # copied together, because they may refer to each other.
        return copy.deepcopy(received)
    module, datamodule, callbacks = received
    if call.options.mesh is not None and call.is_callers_process:
        # A module that has been divided cannot be put together in place.
        module = copy.deepcopy(module)
    return module, datamodule, callbacks


def no_batch(kind: str) -> UsageError:
    """Return the error of a loader without batches; `kind` as for `Workspace.load`."""
    skip = "; to train without validation, leave it out" if kind == "validation" else ""
    return UsageError(
        f"the {kind} loader gave no batch",
        where="Trainer.fit" if kind == "training" else "Trainer",
        fix=f"Check its dataset's length, and drop_last if the batch is larger than the dataset{skip}.",
    )
