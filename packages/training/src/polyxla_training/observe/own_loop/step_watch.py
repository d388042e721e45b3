"""Ordinal 0's reports on the steps of a user's own loop: compilations, host reads, fallbacks, NaN."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from polyxla.plugin import say
from polyxla_training.observe.compilations import Compilation, CompilationTracker, CompileBudget, StepFacts
from polyxla_training.observe.observer import TPU
from polyxla_training.observe.step_counters import LoggedValues, StepCounters

if TYPE_CHECKING:
    from polyxla import Replica
    from polyxla.plugin import Counters

READ_EVERY, READ_AFTER = 50, 3
"""Interval at which logged values are read, and the delay in steps: by then the device has computed them."""
MAX_LINES = 3
"""Number of late compilations that are reported, a line each."""


class StepWatch:
    """Reports what a step did without need. Made at the first step.

    Args:
        replica: the replica, of ordinal 0.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._counters = counters = replica.counters()
        self._values = LoggedValues(counters)
        self._step_counters = self._make_step_counters(counters) if counters else None
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._late = 0
        self._latest: tuple[int, Mapping[str, Any]] = (0, {})
        self._pending: tuple[int, Mapping[str, Any]] | None = None
        self._loader_changes = replica.loader_changes

    def _make_step_counters(self, counters: Counters) -> StepCounters:
        is_shared = self._replica.world.shares_process
        budget = CompileBudget(None, "warn")
        tracker = CompilationTracker(counters, budget, None, is_shared=is_shared, report=self._report)
        on_tpu = self._replica.kind == TPU
        return StepCounters(counters, self._values, tracker, is_shared=is_shared, on_tpu=on_tpu)

    def _report(self, compilation: Compilation) -> None:
        if compilation.expected:
            return
        self._late += 1
        if self._late <= MAX_LINES:
            say(str(compilation))
        # A loop whose batches differ in every step would print a line per step.
        if self._late == MAX_LINES:
            say(
                f"{MAX_LINES} steps have compiled late; further ones are not reported. Batches of one shape "
                "need one program: drop_last=True, or replica.loader(loader, pad=True)"
            )

    def step(self, step: int, optimizer: torch.optim.Optimizer, *, is_lagging: bool = False) -> None:
        """Compare the counters after a step.

        Args:
            step: its number.
            optimizer: made it.
            is_lagging: whether the loop submits it later, so that the counters show the step before it.
        """
        self._optimizers.add(optimizer)
        changes, self._loader_changes = self._loader_changes, self._replica.loader_changes
        if self._step_counters:
            # Two changes: from the training's loader to another one, and back.
            has_evaluated = self._loader_changes - changes > 1
            # Only a loop of its own can make an optimizer's factors constants; `Replica.step` keeps them
            # inputs.
            own = optimizer if is_lagging else None
            facts = StepFacts(own, len(self._optimizers), is_lagging, has_evaluated)
            self._step_counters.step(step, self._replica.current_loader, _write_nothing, facts)

    def optimizer_stepped(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Compare the counters after an optimizer's step in a loop without `Replica.step`.

        Args:
            step: its number.
            optimizer: made it.
        """
        # A lazy loop submits a step together with the next one, so the counters lag by a step.
        is_lagging = not (self._counters and self._counters.is_eager)
        self.step(step - is_lagging, optimizer, is_lagging=is_lagging)

    def log(self, step: int, logged: Mapping[str, Any]) -> None:
        """Check the logged values of some steps for NaN and infinity, a few steps later."""
        self._latest = (step, logged)
        if step % READ_EVERY == 0:
            self._pending = (step, self._scalars(logged))
        elif self._pending and step >= self._pending[0] + READ_AFTER:
            self._values.read(*self._pending)
            self._pending = None

    def _scalars(self, logged: Mapping[str, Any]) -> dict[str, Any]:
        """Return the numbers, and the tensors of one element that can be read without a program."""
        values = {
            # Detached: the values are kept for some steps, and must not keep the autograd graph.
            name: value.detach() if isinstance(value, torch.Tensor) else value
            for name, value in logged.items()
        }
        return {name: value for name, value in values.items() if self._is_scalar(value)}

    def _is_scalar(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return isinstance(value, numbers.Real)
        return value.numel() == 1 and (not self._counters or self._counters.is_submitted(value))

    def check_last(self) -> None:
        """Check the last step's values."""
        step, logged = self._latest
        self._values.read(step, self._scalars(logged))

    def close(self) -> None:
        """Stop tracing."""
        if self._step_counters:
            self._step_counters.close()


def _write_nothing(event: str, **_: Any) -> None:
    """Take the place of a log."""
