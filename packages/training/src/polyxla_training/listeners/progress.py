"""Progress for the person who waits: a bar on a terminal, plain lines elsewhere."""

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

    from polyxla_training.observe.logged_values import Readings
    from polyxla_training.settings import FitSettings


class Progress:
    """A listener that shows epochs and the last numbers on standard error.

    Args:
        how: epochs, and how often logged tensors may be read.
        steps_per_epoch: None where the loader does not know its length.
        readings: reads them.
    """

    def __init__(self, how: FitSettings, steps_per_epoch: int | None, readings: Readings) -> None:
        self._how = how
        self._steps_per_epoch = steps_per_epoch
        self._readings = readings
        self._seen: dict[str, float] = {}
        self._started = time.monotonic()
        self._bar = _Bar(how.max_epochs, steps_per_epoch) if sys.stderr.isatty() else None

    @hookimpl
    def polyxla_step_finished(self, step: int, logged: Mapping[str, Any]) -> None:
        """Advance the bar; at the end of an epoch without one, print a line."""
        ends_epoch = self._steps_per_epoch is not None and step % self._steps_per_epoch == 0
        if ends_epoch or step % self._how.log_every_n_steps == 0:
            self._seen |= self._readings.of(step, logged)
        if self._bar:
            self._bar.show(step, self._seen)
        elif ends_epoch and self._steps_per_epoch:
            self._line(f"epoch {step // self._steps_per_epoch}/{self._how.max_epochs}", step, self._seen)

    def _line(self, head: str, step: int, values: Mapping[str, float]) -> None:
        say(f"{head}, step {step}, {time.monotonic() - self._started:.1f} s: {_numbers(values)}")

    @hookimpl
    def polyxla_metrics_ready(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a validation's numbers."""
        if self._bar:
            self._seen |= metrics
            self._bar.show(step, self._seen)
        else:
            self._line("metrics", step, metrics)

    @hookimpl
    def polyxla_replica_stopped(self) -> None:
        """Leave the terminal as it was."""
        if self._bar:
            self._bar.close()


class _Bar:
    """The terminal's form. Rich is imported here only: a replica without a terminal does not need it."""

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

    def show(self, step: int, seen: Mapping[str, float]) -> None:
        epoch = f"epoch {(step - 1) // self._per_epoch + 1}/{self._epochs}" if self._per_epoch else "training"
        self._progress.update(self._task, completed=step, description=epoch, numbers=_numbers(seen))

    def close(self) -> None:
        self._progress.stop()


def _numbers(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())
