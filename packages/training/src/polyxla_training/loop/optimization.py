"""One batch's gradients, and the update that they make, with the module's hooks around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from polyxla import Replica, UsageError
from polyxla.plugin import optimizer_parameters
from polyxla_training.lightning.schedulers import Schedulers
from polyxla_training.lightning.trainer_view import TrainerView
from polyxla_training.module_adapter import ModuleAdapter
from polyxla_training.options import FitOptions

_UNSET = object()


class Optimization:
    """Computes gradients and updates the parameters, in Lightning's order.

    Which hooks the module overrides is decided here once, not at every step.

    Args:
        replica: averages the gradients.
        adapter: the module.
        optimizer: updates its parameters.
        schedulers: advance with the updates.
        options: the Trainer's options.
        view: what the module sees as ``self.trainer``.

    Attributes:
        loss: the latest batch's loss, detached.
        is_updated: whether the latest batch completed an update.
    """

    def __init__(
        self,
        replica: Replica,
        adapter: ModuleAdapter,
        optimizer: torch.optim.Optimizer,
        schedulers: Schedulers,
        options: FitOptions,
        view: TrainerView,
    ) -> None:
        self._replica, self._adapter, self._optimizer = replica, adapter, optimizer
        self._schedulers, self._view = schedulers, view
        self._accumulate = options.accumulate
        self._clip: dict[str, Any] = {"clip_norm": options.clip_norm, "clip_value": options.clip_value}
        self.loss: torch.Tensor | None = None
        self.is_updated = False
        self._pending = 0
        self._is_stepping = False
        self._find_hooks(adapter.hook)

    def _find_hooks(self, hook: Callable[[str], Callable[..., Any] | None]) -> None:
        self._on_before_zero_grad = hook("on_before_zero_grad")
        self._zero_grad = hook("optimizer_zero_grad")
        self._on_before_backward = hook("on_before_backward")
        self._backward = hook("backward") or torch.Tensor.backward
        self._on_after_backward = hook("on_after_backward")
        self._on_before_optimizer_step = hook("on_before_optimizer_step")
        self._optimizer_step = hook("optimizer_step")
        self._clip_gradients = hook("configure_gradient_clipping")
        if self._clip_gradients:
            if None not in self._clip.values():
                raise UsageError(
                    "clip_norm and clip_value are both set, and configure_gradient_clipping takes one limit",
                    where="Trainer",
                    fix="Leave one of them out.",
                )
            self._clip = {}
        has_hook = self._on_before_optimizer_step or self._clip_gradients
        self._step_options = {**self._clip, **({"before_step": self._call_before_step} if has_hook else {})}

    @property
    def outputs(self) -> dict[str, Any]:
        """What Lightning passes to ``on_train_batch_end``."""
        loss = self.loss if self._accumulate == 1 or self.loss is None else self.loss / self._accumulate
        return {**self._adapter.extra, "loss": loss}

    @property
    def is_pending(self) -> bool:
        """Whether there are gradients that have not made an update yet."""
        return self._pending > 0

    def batch(self, batch: Any, index: int, valid: torch.Tensor | None) -> None:
        """Compute the gradients of a batch, and update the parameters if it completes an update."""
        self.is_updated = False
        if self._optimizer_step is not None and self._pending + 1 == self._accumulate:
            self._call_optimizer_step(index, partial(self._compute, batch, index, valid))
        else:
            self._compute(batch, index, valid)
            if self._pending == self._accumulate:
                self._update()
        if self.is_updated:
            self._schedulers.step_finished()

    def flush(self, index: int) -> None:
        """Make an update from the epoch's last batches, if they are fewer than a whole update has.

        Args:
            index: number of the last batch.
        """
        self.is_updated = False
        if self._pending:
            for parameter in optimizer_parameters(self._optimizer):
                if parameter.grad is not None:
                    # Each was divided by `accumulate`; the mean of those that there are has to be larger.
                    parameter.grad.mul_(self._accumulate / self._pending)
            if self._optimizer_step is not None:
                self._call_optimizer_step(index, lambda: self.loss)
            else:
                self._update()
        if self.is_updated:
            self._schedulers.step_finished()

    def drop(self) -> None:
        """Forget the gradients that have not made an update yet."""
        self._pending = 0

    def _compute(self, batch: Any, index: int, valid: torch.Tensor | None) -> torch.Tensor:
        precision = self._replica.precision
        with precision.forward_context():
            converted = precision.convert_input(batch)
            loss = precision.convert_output(self._adapter.loss(converted, index, valid))
        if self._pending == 0:
            if self._on_before_zero_grad:
                self._on_before_zero_grad(self._optimizer)
            if self._zero_grad:
                self._zero_grad(self._view.current_epoch, index, self._optimizer)
            else:
                self._optimizer.zero_grad()
        self.loss = loss.detach()
        if self._accumulate > 1:
            loss = loss / self._accumulate
        if self._on_before_backward:
            self._on_before_backward(loss)
        self._backward(loss)
        if self._on_after_backward:
            self._on_after_backward()
        self._pending += 1
        return self.loss

    def _update(self) -> None:
        self._pending = 0
        self._is_stepping = True
        try:
            self._replica.update(self._optimizer, **self._step_options)
        finally:
            self._is_stepping = False
        self._view.global_step = self._replica.steps
        self.is_updated = True

    def _call_before_step(self) -> None:
        if self._on_before_optimizer_step:
            self._on_before_optimizer_step(self._optimizer)
        if self._clip_gradients:
            self._clip_gradients(
                self._optimizer,
                gradient_clip_val=self._view.gradient_clip_val,
                gradient_clip_algorithm=self._view.gradient_clip_algorithm,
            )

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
                return real_step()
            result = None if closure is None else closure()
            if not is_computed:
                raise _closure_not_called(self._optimizer_step)
            self._update()
            return result

        # On the instance, where torch's schedules wrap it too; the user's code sees the optimizer itself.
        vars(optimizer)["step"] = step
        try:
            self._optimizer_step(self._view.current_epoch, index, optimizer, closure)
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
