"""One step of training, from a batch to what listeners receive of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from polyxla import UsageError
from polyxla.plugin import optimizer_parameters
from polyxla_training.loop.state import TrainingState
from polyxla_training.loop.workspace import Workspace

_UNSET = object()


class TrainingStep:
    """Computes gradients and updates the parameters, with the module's hooks in Lightning's order.

    `run` is a step, from top to bottom; the methods after it are its parts. Which hooks the module overrides
    is decided once, not at every step.

    Args:
        work: the replica's module and metrics.
        state: the training.

    Raises:
        UsageError: the module clips gradients itself, and the options have two limits.
    """

    def __init__(self, work: Workspace, state: TrainingState) -> None:
        self._replica, self._adapter, self._metrics = work.replica, work.adapter, work.metrics
        self._view, self._progress = work.view, work.progress
        self._loader, self._optimizer, self._schedulers = state.loader, state.optimizer, state.schedulers
        self._accumulate = work.options.accumulate
        self._loss: torch.Tensor | None = None
        self._pending = 0
        self._is_updated = self._is_stepping = False
        hook = work.adapter.hook
        self._after_transfer = work.data.after_transfer
        self._on_batch_start, self._on_batch_end = hook("on_train_batch_start"), hook("on_train_batch_end")
        self._on_before_zero_grad, self._zero_grad = hook("on_before_zero_grad"), hook("optimizer_zero_grad")
        self._on_before_backward, self._on_after_backward = (
            hook("on_before_backward"),
            hook("on_after_backward"),
        )
        self._backward = hook("backward") or torch.Tensor.backward
        self._on_before_optimizer_step = hook("on_before_optimizer_step")
        self._optimizer_step = hook("optimizer_step")
        self._clip_gradients = hook("configure_gradient_clipping")
        self._update_options = self._choose_update_options(work.options.clip_norm, work.options.clip_value)

    def _choose_update_options(self, clip_norm: float | None, clip_value: float | None) -> dict[str, Any]:
        """Return the keyword arguments of `Replica.update`."""
        options: dict[str, Any] = {"clip_norm": clip_norm, "clip_value": clip_value}
        if self._clip_gradients:
            if None not in options.values():
                raise UsageError(
                    "clip_norm and clip_value are both set, and configure_gradient_clipping takes one limit",
                    where="Trainer",
                    fix="Leave one of them out.",
                )
            # The hook clips in place of `Replica.update`.
            options = {}
        if self._on_before_optimizer_step or self._clip_gradients:
            options["before_step"] = self._call_before_step
        return options

    @property
    def is_pending(self) -> bool:
        """Whether there are gradients that have not made an update yet."""
        return self._pending > 0

    def run(self, batch: Any, index: int) -> bool:
        """Train on a batch; return whether the epoch goes on, which a hook of the module decides.

        The gradients of `accumulate` batches make one update.

        Args:
            batch: the records, on the device.
            index: the batch's number in the epoch.
        """
        valid = self._loader.valid
        if self._after_transfer:
            batch = self._after_transfer(batch, 0)
        self._metrics.start_batch(batch, is_training=True, real=self._loader.real, valid=valid)
        if self._on_batch_start and self._on_batch_start(batch, index) == -1:
            # The rest of the epoch is skipped, and with it the update that these gradients belong to.
            self._pending = 0
            return False
        self._is_updated = False
        compute = partial(self._compute, batch, index, valid)
        completes_update = self._pending + 1 == self._accumulate
        if completes_update and self._optimizer_step is not None:
            self._call_optimizer_step(index, compute)
        else:
            compute()
            if completes_update:
                self._update()
        if self._is_updated:
            self._schedulers.step_finished()
        if self._on_batch_end:
            self._on_batch_end(self._outputs(), batch, index)
        self._report()
        return True

    def _compute(self, batch: Any, index: int, valid: torch.Tensor | None) -> torch.Tensor:
        """Add the batch's gradients to those of the update; return the loss, detached."""
        precision = self._replica.precision
        # The backward pass runs outside: autocast would apply to it too, and torch advises against that.
        with precision.forward_context():
            converted = precision.convert_input(batch)
            loss = precision.convert_output(self._adapter.loss(converted, index, valid))
        if self._pending == 0:
            self._clear_gradients(index)
        # Detached before the division: listeners and progress show the loss of the batch.
        self._loss = loss.detach()
        if self._accumulate > 1:
            loss = loss / self._accumulate
        if self._on_before_backward:
            self._on_before_backward(loss)
        self._backward(loss)
        if self._on_after_backward:
            self._on_after_backward()
        self._pending += 1
        return self._loss

    def _clear_gradients(self, index: int) -> None:
        if self._on_before_zero_grad:
            self._on_before_zero_grad(self._optimizer)
        if self._zero_grad:
            self._zero_grad(self._progress.epoch, index, self._optimizer)
        else:
            self._optimizer.zero_grad()

    def _update(self) -> None:
        """Average the gradients over the replicas, clip them, and update the parameters."""
        self._pending = 0
        self._is_stepping = True
        try:
            self._replica.update(self._optimizer, **self._update_options)
        finally:
            self._is_stepping = False
        # Hooks after the update see its number as trainer.global_step.
        self._progress.step = self._replica.steps
        self._is_updated = True

    def _call_before_step(self) -> None:
        """Call the hooks that see the gradients averaged, just before the optimizer's step."""
        if self._on_before_optimizer_step:
            self._on_before_optimizer_step(self._optimizer)
        if self._clip_gradients:
            self._clip_gradients(
                self._optimizer,
                gradient_clip_val=self._view.gradient_clip_val,
                gradient_clip_algorithm=self._view.gradient_clip_algorithm,
            )

    def _outputs(self) -> dict[str, Any]:
        """Return what Lightning passes to ``on_train_batch_end``: its loss is divided by `accumulate`."""
        loss = self._loss
        if loss is not None and self._accumulate > 1:
            loss = loss / self._accumulate
        return {**self._adapter.extra, "loss": loss}

    def _report(self) -> None:
        """Tell the listeners of an update, which ends a step."""
        if self._is_updated:
            logged = {"loss": self._loss, **self._metrics.latest}
            self._replica.finish_step(self._metrics.without_hidden(logged))

    def finish_epoch(self, index: int) -> None:
        """Make an update from the epoch's last batches, if they are fewer than a whole update has.

        Args:
            index: number of the last batch.
        """
        self._is_updated = False
        if self._pending:
            for parameter in optimizer_parameters(self._optimizer):
                if parameter.grad is not None:
                    # Each was divided by `accumulate`; the mean of those that there are has to be larger.
                    parameter.grad.mul_(self._accumulate / self._pending)
            if self._optimizer_step is not None:
                self._call_optimizer_step(index, lambda: self._loss)
            else:
                self._update()
        if self._is_updated:
            self._schedulers.step_finished()
        self._report()

    def _call_optimizer_step(self, index: int, compute: Callable[[], Any]) -> None:
        """Call the module's ``optimizer_step``; the optimizer's ``step(closure)`` in it is a whole update."""
        assert self._optimizer_step is not None
        optimizer, is_computed = self._optimizer, False
        real_step, before = optimizer.step, vars(optimizer).get("step", _UNSET)

        def closure() -> Any:
            nonlocal is_computed
            is_computed = True
            with torch.enable_grad():
                return compute()

        def step(closure: Callable[[], Any] | None = None) -> Any:
            if self._is_stepping:
                # `Replica.update` has averaged the gradients, and now calls the optimizer itself.
                return real_step()
            result = None if closure is None else closure()
            if not is_computed:
                raise _closure_not_called(self._optimizer_step)
            self._update()
            return result

        # On the instance, where torch's schedules wrap it too; the user's code sees the optimizer itself.
        vars(optimizer)["step"] = step
        try:
            self._optimizer_step(self._progress.epoch, index, optimizer, closure)
        finally:
            vars(optimizer).pop("step")
            if before is not _UNSET:
                vars(optimizer)["step"] = before
        if not is_computed:
            raise _closure_not_called(self._optimizer_step)
        # Without an update the next batch clears these gradients, as in Lightning.
        self._pending = 0


def _closure_not_called(optimizer_step: Any) -> UsageError:
    return UsageError(
        "optimizer_step did not call its closure, which runs training_step and the backward pass",
        where=getattr(optimizer_step, "__qualname__", "optimizer_step"),
        fix="Write optimizer.step(closure=optimizer_closure).",
    )
