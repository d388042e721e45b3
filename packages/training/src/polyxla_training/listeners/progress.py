"""The listener that shows progress: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyxla.console import say
from polyxla.hookspecs import hookimpl

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from polyxla_training.observe.logged_values import LoggedValues


class ProgressListener:
    """Shows epochs and the latest values on standard error.

    Args:
        max_epochs: number of passes over the training data.
        steps_per_epoch: None if the loader has no length.
        logged_values: reads the tensors.
    """

    def __init__(self, max_epochs: int, steps_per_epoch: int | None, logged_values: LoggedValues) -> None:
        self._max_epochs, self._steps_per_epoch = max_epochs, steps_per_epoch
        self._logged_values = logged_values
        self._latest: dict[str, float] = {}
        self._started = time.monotonic()
        self._bar = _Bar(max_epochs, steps_per_epoch) if sys.stderr.isatty() else None

    @hookimpl
    def polyxla_step_finished(self, step: int, logged: Mapping[str, Any]) -> None:
        """Advance the bar; without one, print a line at the end of an epoch."""
        ends_epoch = self._steps_per_epoch is not None and step % self._steps_per_epoch == 0
        if self._logged_values.is_due(step) or ends_epoch:
            self._latest |= self._logged_values.read(step, logged)
        if self._bar:
            self._bar.show(step, self._latest)
        elif ends_epoch and self._steps_per_epoch:
            self._line(f"epoch {step // self._steps_per_epoch}/{self._max_epochs}", step, self._latest)

    def _line(self, head: str, step: int, values: Mapping[str, float]) -> None:
        say(f"{head}, step {step}, {time.monotonic() - self._started:.1f} s: {_numbers(values)}")

    @hookimpl
    def polyxla_metrics_ready(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics."""
        if self._bar:
            self._latest |= metrics
            self._bar.show(step, self._latest)
        else:
            self._line("metrics", step, metrics)

    @hookimpl
    def polyxla_replica_stopped(self) -> None:
        """Close the bar."""
        if self._bar:
            self._bar.close()


class _Bar:
    """The bar on a terminal. Imports rich, which a replica without a terminal does not need."""

    def __init__(self, epochs: int, steps_per_epoch: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
        )
        self._epochs, self._per_epoch = epochs, steps_per_epoch
        self._progress: RichProgress = Progress(*columns, console=Console(stderr=True))
        total = epochs * steps_per_epoch if steps_per_epoch else None
        self._task: TaskID = self._progress.add_task("training", total=total, numbers="")
        self._progress.start()

    def show(self, step: int, values: Mapping[str, float]) -> None:
        epoch = f"epoch {(step - 1) // self._per_epoch + 1}/{self._epochs}" if self._per_epoch else "training"
        self._progress.update(self._task, completed=step, description=epoch, numbers=_numbers(values))

    def close(self) -> None:
        self._progress.stop()


def _numbers(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())
