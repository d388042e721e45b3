"""The training loop: its epochs, the validations within and after them, and its end."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from contextlib import closing
from typing import Any

from polyxla import Replica
from polyxla.plugin import Loader
from polyxla_training.lightning.callbacks import is_listener, load_states
from polyxla_training.lightning.schedulers import configure_optimizers
from polyxla_training.lightning.trainer_view import LoggerListener, LoggerView
from polyxla_training.loop.call import TrainerCall, TrainerOutcome
from polyxla_training.loop.evaluation import evaluate, evaluate_call
from polyxla_training.loop.state import TrainingState
from polyxla_training.loop.step import TrainingStep
from polyxla_training.loop.workspace import Workspace, no_batch
from polyxla_training.options import Fit
from polyxla_training.progress import ValidationSchedule, length_of


def run(replica: Replica, call: TrainerCall) -> TrainerOutcome:
    """Train or evaluate in this replica; see `polyxla_training.Trainer`."""
    with Workspace(replica, call) as work:
        try:
            work.set_up()
            # Errors of the whole run go to on_exception, as in Lightning: those of the data and of the setup
            # too.
            if call.stage == "fit":
                TrainingLoop(work, *call.loaders).fit()
            else:
                evaluate_call(work, *call.loaders)
            return work.finish()
        except BaseException as error:
            work.data.report_error(error)
            raise


class TrainingLoop:
    """Trains one replica's module.

    Args:
        work: the module on the device, its data and its metrics.
        train: the training batches that were passed, or None.
        val: the validation batches that were passed, or None.

    Raises:
        UsageError: there is nothing to train on, or the module cannot do what its data is for.
    """

    def __init__(
        self, work: Workspace, train: Iterable[Any] | None = None, val: Iterable[Any] | None = None
    ) -> None:
        self._work, self._replica, self._adapter = work, work.replica, work.adapter
        self._options, self._progress = work.options, work.progress
        self._is_finished = False
        self._state_before_leaving: dict[str, Any] | None = None
        self._loader = work.load(work.data.find(train, "train_dataloader"), "training")
        self._validation = self._validation_loader(val)
        self._batches_per_epoch = batches = work.batches_of(self._loader, "training")
        length = length_of(self._loader)
        self._unread = 0 if length is None or batches is None else length - batches
        self._schedule = ValidationSchedule.of(self._options, batches)
        # A LightningModule's configure_optimizers reads these.
        self._steps_per_epoch = None if batches is None else -(-batches // self._options.accumulate)
        self._progress.batches_per_epoch = batches
        self._progress.expected_steps = self._options.expected_steps(self._steps_per_epoch)
        self._batches_so_far = 0
        self._state = self._make_state()
        self._step = TrainingStep(work, self._state)
        self._on_epoch_end = work.adapter.hook("on_train_epoch_end")
        self._resume_and_add_listeners()

    def _validation_loader(self, val: Iterable[Any] | None) -> Loader | None:
        # A data module may serve several modules, and not all of them validate.
        is_unused = self._work.call.datamodule is not None and not self._adapter.has_step("validation")
        is_unused = is_unused or self._options.limit_val_batches == 0
        found = None if is_unused else self._work.data.find(val, "val_dataloader")
        if found is None:
            return None
        # Refused here, before an epoch is spent on a module that cannot validate.
        self._adapter.require("validation")
        return self._work.load(found, "validation")

    def _make_state(self) -> TrainingState:
        """Make the optimizer and its schedules."""
        work, adapter = self._work, self._adapter
        optimizer, schedulers = configure_optimizers(work.module, adapter.hook("lr_scheduler_step"))
        work.view.optimizers = [optimizer]
        adapter.lend_optimizer(self._replica, optimizer, schedulers)
        return TrainingState(
            replica=self._replica,
            module=work.module,
            optimizer=optimizer,
            schedulers=schedulers,
            loader=self._loader,
            validation=self._validation,
            metrics=work.metrics,
            progress=self._progress,
            seed=self._options.seed,
            callbacks=list(work.view.callbacks),
            on_save=adapter.hook("on_save_checkpoint"),
            data_state=work.data.state_dict,
        )

    def _resume_and_add_listeners(self) -> None:
        """Resume, then let plugins add listeners, which read the step that training begins at."""
        work, state, checkpoint = self._work, self._state, self._work.checkpoint
        if checkpoint is not None:
            state.resume(checkpoint)
            left = length_of(self._loader)
            if left is not None:
                # The rest of an epoch that began with batches of another size may be a batch longer.
                before = self._loader.batches_before
                self._progress.batches_per_epoch = before + max(left - self._unread, 0)
        fit = Fit(
            options=self._options,
            log_every_n_steps=self._options.read_interval(self._progress.expected_steps),
            module=work.module,
            optimizer=state.optimizer,
            steps_per_epoch=self._steps_per_epoch,
            state_dict=self._state_dict,
            stop=self._stop,
        )
        found = self._replica.hook.polyxla_listeners(replica=self._replica, fit=fit)
        # pluggy calls the listener that was added last first: checkpoints, which plugins add, hold what the
        # user's callbacks have made of an event.
        listeners: list[Any] = []
        for listener in itertools.chain(*found, filter(is_listener, work.callbacks)):
            self._replica.add_listener(listener)
            listeners.append(listener)
        self._show_loggers(listeners)
        # A callback of Lightning's that is also a listener is there already.
        state.callbacks += [listener for listener in listeners if listener not in state.callbacks]
        saved = {} if checkpoint is None else checkpoint.state["callbacks"]
        load_states(state.callbacks, saved, is_first=self._replica.is_first)
        if checkpoint is not None:
            # The state on the host is a copy of the whole model, which is not needed any more.
            del checkpoint.state["module"], checkpoint.state["optimizer"]
        self._replica.hook.polyxla_fit_started(replica=self._replica, fit=fit)

    def _show_loggers(self, listeners: Iterable[Any]) -> None:
        """Show the module its loggers, which only ordinal 0 has."""
        names, log_dir = self._options.logger_arguments, self._options.log_dir
        own = {listener.name: listener for listener in listeners if isinstance(listener, LoggerListener)}
        self._work.view.loggers = [
            LoggerView(name, log_dir, own[name].experiment, own[name].write)
            if name in own
            else LoggerView(name, log_dir)
            for name in names
        ]

    def fit(self) -> None:
        """Train for the requested epochs, and validate after each."""
        self._progress.phase = "training"
        self._adapter.call("on_fit_start")
        self._adapter.start_training(self._replica)
        self._adapter.call("on_train_start")
        if self._work.checkpoint is not None:
            # After the hooks of the start, which may draw random numbers and log values.
            self._state.resume_streams(self._work.checkpoint)
            self._work.checkpoint = None
        is_over = True
        # An epoch that is not over ends the training; the run that resumes finishes it.
        while is_over and self._progress.epoch < self._options.max_epochs and not self._is_all_done():
            is_over = self._epoch()
        self._is_finished = True
        if is_over:
            self._replica.hook.polyxla_fit_finished(replica=self._replica)
        else:
            self._leave_epoch()
        self._adapter.call_last("on_train_end")

    def _epoch(self) -> bool:
        """Train for the rest of an epoch, and end the epoch if it is over; return whether it is.

        An epoch is over when its batches are used up, or a hook skips the rest of them. Training that ends
        before leaves the epoch to the run that resumes: its schedules, validation and hooks come once.
        """
        progress, replica = self._progress, self._replica
        self._work.metrics.outside_batches()
        progress.phase = "training"
        if self._loader.batches_before == 0:
            self._adapter.call("on_train_epoch_start")
        is_over, is_skipped = self._batches()
        if progress.stopped or not is_over:
            return False
        self._work.metrics.outside_batches()
        # Schedules come before the validation, as in Lightning, except those that need its metrics.
        self._state.schedulers.epoch_finished()
        self._finish_metrics(is_skipped)
        self._state.schedulers.metrics_ready(progress.means)
        progress.phase = ""
        if replica.world_size > 1:
            # Any replica may ask to stop; a replica that stopped alone would leave the others waiting.
            progress.should_stop = any(replica.all_gather(progress.should_stop))
        progress.validated_batches = 0
        progress.batches_per_epoch = self._batches_per_epoch
        progress.epoch += 1
        # Before the listeners: their checkpoint must begin with the next epoch, not at the end of this one.
        self._loader.finish_epoch()
        replica.hook.polyxla_epoch_finished(replica=replica, epoch=progress.epoch)
        return not progress.stopped

    def _batches(self) -> tuple[bool, bool]:
        """Train on the rest of an epoch; return whether the epoch is over, and whether a hook has cut it."""
        # A resumed run has consumed some batches of this epoch already; indices count on from them.
        before, whole = self._loader.batches_before, self._progress.batches_per_epoch
        self._batches_so_far = before
        self._validate_within(before)
        if before and self._is_done():
            return before == whole, False
        left = None if whole is None else max(0, whole - before)
        # Closing ends the runtime's threads, which read ahead.
        with closing(iter(self._loader)) as arriving:
            for index, batch in enumerate(itertools.islice(arriving, left), start=before):
                self._batches_so_far = index + 1
                if not self._step.run(batch, index):
                    return True, True
                self._validate_within(index + 1)
                if self._is_done():
                    return self._batches_so_far == whole, False
        # An iterable dataset tells only now that it has nothing.
        if self._batches_so_far == 0:
            raise no_batch("training")
        self._step.finish_epoch(self._batches_so_far - 1)
        return True, False

    def _is_done(self) -> bool:
        """Return whether training ends here: at the end of an update, so that no gradients are lost."""
        if self._step.is_pending:
            return False
        limit = self._options.max_steps
        if self._progress.stopped or (limit is not None and self._replica.steps >= limit):
            return True
        # Several replicas agree on should_stop at the end of the epoch, where all of them meet.
        is_agreed = self._replica.world_size == 1 or self._progress.phase != "training"
        return self._progress.should_stop and is_agreed

    def _is_all_done(self) -> bool:
        """Return whether nothing is left: an epoch may have ended for a stop, with its last batch used up."""
        return self._is_done() and self._loader.batches_before != self._progress.batches_per_epoch

    def _validate_within(self, batches: int) -> None:
        """Validate after this number of batches, if a validation is due and the epoch goes on."""
        if batches in (0, self._progress.batches_per_epoch) or self._is_done():
            return
        if self._validation_is_due(batches, is_end=False):
            # The values that belong to the whole epoch are published at its end.
            with self._work.metrics.set_aside():
                self._validate(batches)
            self._replica.hook.polyxla_validation_finished(replica=self._replica)

    def _validation_is_due(self, batches: int, *, is_end: bool) -> bool:
        if self._validation is None or self._progress.validated_batches == batches:
            return False
        return self._schedule.is_due(self._progress.epoch, batches, is_end=is_end)

    def _validate(self, batches: int) -> None:
        assert self._validation is not None
        # Set before, so that a checkpoint after the validation has it; none is saved within.
        self._progress.validated_batches = batches
        if not self._step.is_pending:
            self._adapter.call("on_validation_model_zero_grad")
        evaluate(self._work, self._validation, "validation")

    def _finish_metrics(self, is_skipped: bool) -> None:
        """Validate, call the hooks of an epoch's end, and publish what was logged."""
        # As in Lightning, which does not validate an epoch that a hook has cut short.
        is_validated = not is_skipped and self._validation_is_due(self._batches_so_far, is_end=True)
        if is_validated:
            self._work.publish()
            self._validate(self._batches_so_far)
            if self._is_finished:
                # No epoch's end follows, at which the best state would be saved.
                self._replica.hook.polyxla_validation_finished(replica=self._replica)
        if self._on_epoch_end:
            self._on_epoch_end()
        if self._on_epoch_end or not is_validated:
            self._work.publish()

    def _leave_epoch(self) -> None:
        """Evaluate a training that ends within an epoch, with the hooks that Lightning calls there.

        Checkpoints hold the state before, so that a resumed run goes on as if training had not ended.
        """
        if self._options.checkpoint_dir is not None:
            left = self._state.state_dict()
            # Callbacks and the data module may still change the objects that they have returned.
            copies = {name: copy.deepcopy(left[name]) for name in ("callbacks", "datamodule")}
            self._state_before_leaving = left | copies
        self._replica.hook.polyxla_fit_finished(replica=self._replica)
        if not self._progress.stopped:
            self._work.metrics.outside_batches()
            self._finish_metrics(is_skipped=False)
            self._progress.phase = ""

    def _state_dict(self) -> dict[str, Any]:
        return self._state_before_leaving or self._state.state_dict()

    def _stop(self, reason: str) -> None:
        """End training after the current step; every replica must call it at the same step."""
        if not self._is_finished:
            self._progress.stopped = reason
