"""The training loop."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Iterable
from contextlib import closing
from typing import Any, Self

import torch

from polyxla import Replica, UsageError
from polyxla.plugin import Loader, move_module
from polyxla_training.lightning.callbacks import LightningCallbacks, is_callback, is_listener, load_states
from polyxla_training.lightning.data import Data, divisible_by_batches
from polyxla_training.lightning.schedulers import configure_optimizers
from polyxla_training.lightning.trainer_view import LoggerListener, LoggerView, TrainerView
from polyxla_training.loop.call import Call, Outcome
from polyxla_training.loop.evaluation import evaluate, no_batch
from polyxla_training.loop.limits import ValidationSchedule, count_batches, length_of
from polyxla_training.loop.optimization import Optimization
from polyxla_training.metrics import MetricAccumulator
from polyxla_training.module_adapter import ModuleAdapter
from polyxla_training.options import Fit
from polyxla_training.shared_directory import check_shared
from polyxla_training.state import Checkpoint, TrainingState, find_checkpoint


def run(replica: Replica, call: Call) -> Outcome:
    """Train or evaluate in this replica; see `polyxla_training.Trainer`."""
    with TrainingLoop(replica, call) as loop:
        try:
            loop.set_up()
            if call.stage == "fit":
                loop.fit(*call.loaders)
            else:
                loop.evaluate(*call.loaders)
            return loop.finish()
        except BaseException as error:
            loop.data.report_error(error)
            raise


class TrainingLoop:
    """One replica's training: the module on the device, the counters, the metrics.

    Args:
        replica: the replica to train in.
        call: what to do.
    """

    def __init__(self, replica: Replica, call: Call) -> None:
        self.replica, self.call, self.options = replica, call, call.options
        if self.options.seed is not None:
            replica.seed_everything(self.options.seed)
        received = (call.module, call.datamodule, self.options.callbacks)
        if replica.world.shares_process:
            # Replicas that are threads received the one module of the caller: each trains a copy.
            received = copy.deepcopy(received)
        self.module, datamodule, self._callbacks = received
        if not replica.world.shares_process and self.options.mesh is not None and call.is_callers_process:
            # What has been divided cannot be put together in place.
            self.module = copy.deepcopy(self.module)
        self.view = TrainerView.at_start(replica, self.options, datamodule)
        self.accumulator = MetricAccumulator(replica)
        self.lightning_callbacks = LightningCallbacks(filter(is_callback, self._callbacks), self.view)
        self.view.callbacks = self.lightning_callbacks.callbacks
        self.adapter = ModuleAdapter(self.module, self.accumulator, self.view, self.lightning_callbacks)
        self.data = Data(replica, self.module, datamodule, call.stage, self.view, self.lightning_callbacks)
        self.metrics: dict[str, float] = {}
        self.predictions: list[Any] = []
        self.stopped = ""
        self._is_finished = False
        self._left: dict[str, Any] | None = None
        self._own_optimizers: list[torch.optim.Optimizer] = []
        self._checkpoint: Checkpoint | None = None

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
        if self.call.stage == "fit" and self.options.checkpoint_dir is not None:
            # First of all: preparing the data may take long.
            directory = self.options.checkpoint_dir
            check_shared(self.replica, directory, f"checkpoint_dir={os.fspath(directory)!r}")
        self.adapter.lend_replica(self.replica)
        self.adapter.configure_callbacks()
        self.data.prepare()
        self.data.set_up()
        self.adapter.call("configure_sharded_model")
        self.adapter.call("configure_model")
        if self.call.stage == "fit" and self.options.resume is not None:
            self._checkpoint = find_checkpoint(
                self.replica,
                self.options.resume,
                self.options.checkpoint_dir,
                in_shards=self.options.mesh is not None,
            )
        if self._checkpoint is not None:
            self.data.load_state_dict(self._checkpoint.state["datamodule"])
            self._checkpoint.pass_to(self.adapter.hook("on_load_checkpoint"))
        # Optimizers that the module made before the move hold its parameters, which move with it.
        self._own_optimizers = self.adapter.own_optimizers()
        moved = self.replica.setup(self.module, *self._own_optimizers, mesh=self.options.mesh)
        if moved is not self.module:
            # The precision policy has wrapped it.
            self.adapter.release()
            self.module = moved
            self.adapter = ModuleAdapter(moved, self.accumulator, self.view, self.lightning_callbacks)

    def fit(self, train: Iterable[Any] | None, val: Iterable[Any] | None) -> None:
        """Train for the requested epochs, and validate after each."""
        self.loader = self._load(self.data.find(train, "train_dataloader"), "training")
        self.validation = self._validation_loader(val)
        self._prepare()
        self.view.training = True
        self.adapter.call("on_fit_start")
        self.adapter.start_training(self.replica)
        self.adapter.call("on_train_start")
        if self._checkpoint is not None:
            # After the hooks of the start, which may draw random numbers and log values.
            self._state.resume_streams(self._checkpoint)
            self._checkpoint = None
        is_over = True
        while is_over and self.view.current_epoch < self.options.max_epochs and not self._is_all_done():
            is_over = self._epoch()
        self._is_finished = True
        if is_over:
            self.replica.hook.polyxla_fit_finished(replica=self.replica)
        else:
            self._leave_epoch()
        self.adapter.call_last("on_train_end")

    def evaluate(self, data: Iterable[Any] | None) -> None:
        """Run ``validation_step``, ``test_step`` or ``predict_step`` over the data."""
        short, kind = {"validate": ("val", "validation")}.get(self.call.stage, (self.call.stage,) * 2)
        found = self.data.find(data, f"{short}_dataloader")
        if kind == "predict" and self.replica.world_size > 1:
            found = divisible_by_batches(found)
        loader = self._load(found, kind)
        self.adapter.require(kind)
        self._evaluate(loader, kind)

    def _validation_loader(self, val: Iterable[Any] | None) -> Loader | None:
        # A data module may serve several modules, and not all of them validate.
        is_unused = self.call.datamodule is not None and not self.adapter.has_step("validation")
        is_unused = is_unused or self.options.limit_val_batches == 0
        found = None if is_unused else self.data.find(val, "val_dataloader")
        if found is None:
            return None
        # Refused here, before an epoch is spent on a module that cannot validate.
        self.adapter.require("validation")
        return self._load(found, "validation")

    def _load(self, data: Iterable[Any] | None, kind: str) -> Loader:
        """Return a loader of `data` on the device: in an evaluation, every record once over all replicas."""
        if data is None:
            short = {"training": "train", "validation": "val"}.get(kind, kind)
            raise UsageError(
                f"there is nothing to {'train' if kind == 'training' else self.call.stage} on",
                where=f"Trainer.{self.call.stage}",
                fix=f"Pass the {short} loader, or write {short}_dataloader in the module.",
            )
        if kind != "predict" and length_of(data) == 0:
            raise no_batch(kind)
        pad, is_training = self.adapter.accepts_mask(kind), kind == "training"
        return self.data.load(data, pad=pad, repeat=is_training, prefetch=self.options.prefetch)

    def _prepare(self) -> None:
        """Make the optimizer, resume, and let plugins add listeners, in this order."""
        batches = count_batches(length_of(self.loader), self.options, "limit_train_batches")
        self._batches_per_epoch = batches
        self.schedule = ValidationSchedule.of(self.options, batches)
        steps_per_epoch = None if batches is None else -(-batches // self.options.accumulate)
        # A LightningModule's configure_optimizers reads these.
        self.view.num_training_batches = float("inf") if batches is None else batches
        self.view.estimated_stepping_batches = self.options.expected_steps(steps_per_epoch)
        adapter, options = self.adapter, self.options
        advance = adapter.hook("lr_scheduler_step")
        optimizer, self.schedulers = configure_optimizers(self.module, advance)
        self.view.optimizers = [optimizer]
        adapter.lend_optimizer(self.replica, optimizer, self.schedulers)
        self.optimization = Optimization(
            self.replica, adapter, optimizer, self.schedulers, options, self.view
        )
        self._on_batch_start = adapter.hook("on_train_batch_start")
        self._on_batch_end = adapter.hook("on_train_batch_end")
        self._on_epoch_end = adapter.hook("on_train_epoch_end")
        with_states: list[Any] = list(self.lightning_callbacks.callbacks)
        self._state = state = TrainingState(
            self.replica,
            self.module,
            optimizer,
            self.schedulers,
            self.loader,
            self.accumulator,
            self.view,
            options.seed,
            adapter.hook("on_save_checkpoint"),
            self.data.state_dict,
            with_states,
            self.validation,
            self.metrics,
        )
        if self._checkpoint is not None:
            state.resume(self._checkpoint)
        # Listeners come after resuming: they read the step that training begins at.
        every = options.read_interval(self.view.estimated_stepping_batches)
        fit = Fit(options, every, self.module, optimizer, steps_per_epoch, self._state_dict, self.stop)
        found = self.replica.hook.polyxla_listeners(replica=self.replica, fit=fit)
        # The last one added is called first: checkpoints hold what the callbacks have made of an event.
        listeners = [*itertools.chain(*found), *filter(is_listener, self._callbacks)]
        for listener in listeners:
            self.replica.add_listener(listener)
        self._show_loggers(listeners)
        with_states += [one for one in listeners if one not in with_states]
        saved = {} if self._checkpoint is None else self._checkpoint.state["callbacks"]
        load_states(with_states, saved, is_first=self.replica.is_first)
        if self._checkpoint is not None:
            # A copy of the whole model.
            del self._checkpoint.state["module"], self._checkpoint.state["optimizer"]
        self.replica.hook.polyxla_fit_started(replica=self.replica, fit=fit)

    def _show_loggers(self, listeners: Iterable[Any]) -> None:
        """Show the module its loggers, which only ordinal 0 has."""
        names, log_dir = self.options.logger_arguments, self.options.log_dir
        own = {one.name: one for one in listeners if isinstance(one, LoggerListener)}
        self.view.loggers = [
            LoggerView(name, log_dir, own[name].experiment, own[name].write)
            if name in own
            else LoggerView(name, log_dir)
            for name in names
        ]
        self.view.logger = next(iter(self.view.loggers), None)

    def stop(self, reason: str) -> None:
        """End training after the current step; every replica must call it at the same step."""
        if not self._is_finished:
            self.stopped = reason

    def _is_done(self) -> bool:
        """Return whether training ends here: at the end of an update, so that no gradients are lost."""
        if self.optimization.is_pending:
            return False
        limit = self.options.max_steps
        if self.stopped or (limit is not None and self.replica.steps >= limit):
            return True
        # Several replicas agree on it at the end of the epoch.
        return self.view.should_stop and (self.replica.world_size == 1 or not self.view.training)

    def _is_all_done(self) -> bool:
        """Return whether nothing is left: an epoch may have ended for a stop, with its last batch used up."""
        return self._is_done() and self.loader.batches_before != self._batches_per_epoch

    def _epoch(self) -> bool:
        """Train for the rest of an epoch, and end the epoch if it is over; return whether it is.

        An epoch is over when its batches are used up, or a hook skips the rest of them. Training that ends
        before leaves the epoch to the run that resumes: its schedules, validation and hooks come once.
        """
        self.accumulator.outside_batches()
        self.view.training = True
        if self.loader.batches_before == 0:
            self.adapter.call("on_train_epoch_start")
        is_over, is_skipped = self._batches()
        if self.stopped or not is_over:
            return False
        self.accumulator.outside_batches()
        self.schedulers.epoch_finished()
        self._finish_metrics(is_skipped)
        self.schedulers.metrics_ready(self.metrics)
        self.view.training = False
        if self.replica.world_size > 1:
            self.view.should_stop = any(self.replica.all_gather(self.view.should_stop))
        self.view.validated_batches = 0
        self.view.current_epoch += 1
        self.loader.finish_epoch()
        self.replica.hook.polyxla_epoch_finished(replica=self.replica, epoch=self.view.current_epoch)
        return not self.stopped

    def _finish_metrics(self, is_skipped: bool) -> None:
        """Validate, call the hooks of an epoch's end, and publish what was logged."""
        # As in Lightning, which does not validate an epoch that a hook has cut short.
        is_validated = not is_skipped and self._validation_is_due(self._batches_so_far, is_end=True)
        if is_validated:
            self._publish()
            self._validate(self._batches_so_far)
            if self._is_finished:
                # No epoch's end follows, at which the best state would be saved.
                self.replica.hook.polyxla_validation_finished(replica=self.replica)
        if self._on_epoch_end:
            self._on_epoch_end()
        if self._on_epoch_end or not is_validated:
            self._publish()

    def _leave_epoch(self) -> None:
        """Evaluate a training that ends within an epoch, with the hooks that Lightning calls there.

        Checkpoints hold the state before, so that a resumed run goes on as if training had not ended.
        """
        if self.options.checkpoint_dir is not None:
            self._left = self._state.state_dict()
            for name in ("callbacks", "datamodule"):
                # Their owners may still change what they have returned.
                self._left[name] = copy.deepcopy(self._left[name])
        self.replica.hook.polyxla_fit_finished(replica=self.replica)
        if not self.stopped:
            self.accumulator.outside_batches()
            self._finish_metrics(is_skipped=False)
            self.view.training = False

    def _state_dict(self) -> dict[str, Any]:
        return self._left or self._state.state_dict()

    def _batches(self) -> tuple[bool, bool]:
        """Train on the rest of an epoch; return whether the epoch is over, and whether a hook has cut it."""
        # A resumed run has consumed some batches of this epoch already; indices count on from them.
        before, whole = self.loader.batches_before, self._batches_per_epoch
        self._batches_so_far = before
        self._validate_within(before)
        if before and self._is_done():
            return before == whole, False
        left = None if whole is None else max(0, whole - before)
        with closing(iter(self.loader)) as arriving:
            for index, batch in enumerate(itertools.islice(arriving, left), start=before):
                self._batches_so_far = index + 1
                if not self._batch(batch, index):
                    self.optimization.drop()
                    return True, True
                self._validate_within(index + 1)
                if self._is_done():
                    return self._batches_so_far == whole, False
        if self._batches_so_far == 0:
            raise no_batch("training")
        self.optimization.flush(self._batches_so_far - 1)
        self._finish_step()
        return True, False

    def _validate_within(self, batches: int) -> None:
        """Validate after so many batches of the epoch, if it is due and the epoch goes on."""
        if batches in (0, self._batches_per_epoch) or self._is_done():
            return
        if self._validation_is_due(batches, is_end=False):
            # The values that belong to the whole epoch are published at its end.
            with self.accumulator.set_aside():
                self._validate(batches)
            self.replica.hook.polyxla_validation_finished(replica=self.replica)

    def _validation_is_due(self, batches: int, *, is_end: bool) -> bool:
        is_done = self.view.validated_batches == batches
        epoch = self.view.current_epoch
        return (
            self.validation is not None
            and not is_done
            and self.schedule.is_due(epoch, batches, is_end=is_end)
        )

    def _validate(self, batches: int) -> None:
        assert self.validation is not None
        # Set before, so that a checkpoint after the validation has it; none is saved within.
        self.view.validated_batches = batches
        if not self.optimization.is_pending:
            self.adapter.call("on_validation_model_zero_grad")
        self._evaluate(self.validation, "validation")

    def _batch(self, batch: Any, index: int) -> bool:
        """Train on a batch; return whether the epoch goes on."""
        loader = self.loader
        if self.data.after_transfer:
            batch = self.data.after_transfer(batch, 0)
        self.accumulator.start_batch(batch, is_training=True, real=loader.real, valid=loader.valid)
        if self._on_batch_start and self._on_batch_start(batch, index) == -1:
            return False
        self.optimization.batch(batch, index, loader.valid)
        if self._on_batch_end:
            self._on_batch_end(self.optimization.outputs, batch, index)
        self._finish_step()
        return True

    def _finish_step(self) -> None:
        if self.optimization.is_updated:
            logged = {"loss": self.optimization.loss, **self.accumulator.latest}
            self.replica.finish_step(self.accumulator.without_hidden(logged))

    def _evaluate(self, loader: Loader, kind: str) -> None:
        parts = (self.replica, self.adapter, self.accumulator, self.data, self.view)
        option = f"limit_{'val' if kind == 'validation' else kind}_batches"
        batches = count_batches(length_of(loader), self.options, option)
        evaluate(loader, kind, *parts, publish=self._publish, batches=batches, predictions=self.predictions)

    def _publish(self) -> None:
        means = self.accumulator.take(self.replica)
        self.metrics |= means
        self.view.callback_metrics |= {name: torch.tensor(value) for name, value in means.items()}
        if shown := self.accumulator.without_hidden(means):
            self.replica.hook.polyxla_metrics_ready(
                replica=self.replica, step=self.replica.steps, metrics=shown
            )

    def finish(self) -> Outcome:
        """Move the module back to the host and return the result."""
        replica = self.replica
        if self.options.strategy == "debug":
            replica.print(replica.report())
        if self.options.mesh is None:
            move_module(self.module, torch.device("cpu"), self._own_optimizers)
        if self.call.stage == "fit":
            self.adapter.call_last("on_fit_end")
        state = self._state_for_caller()
        self.data.tear_down()
        return Outcome(
            metrics=self.metrics,
            epochs=self.view.current_epoch,
            steps=replica.steps,
            runtime=replica.runtime,
            device=replica.kind,
            world_size=replica.world_size,
            state=state,
            stopped=self.stopped,
            predictions=self.predictions,
            data_ordinal=replica.data_world.ordinal,
        )

    def _state_for_caller(self) -> dict[str, Any] | None:
        """Return the module's state if the calling process receives it from this replica."""
        is_wanted = self.call.returns_state(self.replica.world)
        if self.options.mesh is None:
            return dict(self.module.state_dict()) if is_wanted else None
        from polyxla_training.sharding.sharded_state import gathered

        # A collective, also in replicas that return nothing.
        state = gathered(dict(self.module.state_dict()), keep=is_wanted)
        return state if is_wanted else None
