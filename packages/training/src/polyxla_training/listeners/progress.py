"""What a training shows on standard error: the table of layers, then a bar or plain lines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from polyxla import hookimpl
from polyxla.plugin import say
from polyxla_training.checkpoint.errors import size_text

if TYPE_CHECKING:
    import torch
    from IPython.display import DisplayHandle
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from polyxla_training.observe.step_counters import LoggedValues

MOST_LAYERS = 20
"""Layers of a module that is small enough for a table of all of them."""
WIDTH = 110
"""Columns of the table where there is no terminal."""


def print_layers(module: torch.nn.Module, summary: bool | int) -> None:
    """Print the layers on standard error, with the numbers and the bytes of their parameters.

    A layer contains its sublayers. Tied parameters are in the row of each layer that has them, and once in
    the last row, which is the whole module. A mesh divides none of the numbers.

    Args:
        module: the module, in the dtypes that it trains in.
        summary: number of levels; True: all, but one if there are more than `MOST_LAYERS` layers.
    """
    from rich.console import Console
    from rich.table import Table

    depth = _levels(module) if summary is True else summary
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("layer", "type"):
        table.add_column(name, overflow="fold")
    for name in ("parameters", "trainable", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, layer in _layers(module, depth):
        table.add_row(name, type(layer).__name__, *_sizes(layer))
    table.add_row("all", type(module).__name__, *_sizes(module), style="bold")
    on_terminal = sys.stderr.isatty()
    width = None if on_terminal else WIDTH
    # Plain text in a notebook too, as all other lines are: replicas are forks of the kernel, which cannot
    # display.
    console = Console(stderr=True, force_terminal=on_terminal, force_jupyter=False, width=width)
    console.print(table, highlight=False, markup=False)


def _levels(module: torch.nn.Module) -> int:
    names = [name for name, _ in module.named_modules() if name]
    return 1 + max((name.count(".") for name in names), default=0) if len(names) <= MOST_LAYERS else 1


def _layers(module: torch.nn.Module, depth: int) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, layer in module.named_modules():
        if name and name.count(".") < depth:
            yield name, layer


def _sizes(layer: torch.nn.Module) -> tuple[str, str, str]:
    parameters = list(layer.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return f"{sum(parameter.numel() for parameter in parameters):,}", f"{trained:,}", size_text(size_bytes)


UPDATE_S = 0.2
"""Least seconds between two updates of a notebook's output."""


class ProgressListener:
    """Shows epochs and the latest values on standard error.

    Args:
        max_epochs: number of passes over the training data.
        steps_per_epoch: None if the loader has no length.
        logged_values: reads the tensors.
        optimizer: has the learning rate, which a bar shows.
    """

    def __init__(
        self,
        max_epochs: int,
        steps_per_epoch: int | None,
        logged_values: LoggedValues,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._max_epochs, self._steps_per_epoch = max_epochs, steps_per_epoch
        self._logged_values = logged_values
        self._latest: dict[str, float] = {}
        self._started = time.monotonic()
        in_notebook = _is_in_notebook()
        has_bar = in_notebook or sys.stderr.isatty()
        self._bar = _Bar(max_epochs, steps_per_epoch, optimizer, in_notebook) if has_bar else None

    @hookimpl
    def polyxla_step_finished(self, step: int, logged: Mapping[str, Any]) -> None:
        """Advance the bar; without one, print a line at the end of an epoch."""
        # Read at the end of an epoch too, so that its line shows the last values and not those of n steps
        # ago.
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
        elif metrics:
            self._line("metrics", step, metrics)

    @hookimpl
    def polyxla_replica_stopped(self) -> None:
        """Close the bar."""
        if self._bar:
            self._bar.close()


class _Bar:
    """The bar on a terminal, or below a notebook's cell. Imports rich, which other replicas do not need.

    Rich's own bar in notebooks needs ipywidgets; one output that is updated needs IPython only.
    """

    def __init__(
        self,
        epochs: int,
        steps_per_epoch: int | None,
        optimizer: torch.optim.Optimizer,
        in_notebook: bool,
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            # Without markup=False, a metric called "loss[val]" would lose the end of its name.
            TextColumn("{task.fields[rate]}{task.fields[numbers]}", markup=False),
        )
        self._epochs, self._per_epoch, self._optimizer = epochs, steps_per_epoch, optimizer
        self._progress: RichProgress = Progress(*columns, console=Console(stderr=True))
        total = epochs * steps_per_epoch if steps_per_epoch else None
        self._task: TaskID = self._progress.add_task("training", total=total, rate="", numbers="")
        self._output: DisplayHandle | None = None
        self._next_update = 0.0
        if in_notebook:
            from IPython.display import display

            self._output = display(self._progress, display_id=True)
        else:
            self._progress.start()

    def show(self, step: int, values: Mapping[str, float]) -> None:
        epoch = f"epoch {(step - 1) // self._per_epoch + 1}/{self._epochs}" if self._per_epoch else "training"
        speed = self._progress.tasks[0].speed
        rate = f"{speed:.3g} it/s  " if speed else ""
        numbers = _numbers({**_learning_rate(self._optimizer), **values})
        self._progress.update(self._task, completed=step, description=epoch, rate=rate, numbers=numbers)
        # Each update replaces the whole output in the browser, so they are limited in number.
        if self._output and time.monotonic() >= self._next_update:
            self._next_update = time.monotonic() + UPDATE_S
            self._output.update(self._progress)

    def close(self) -> None:
        self._progress.stop()
        if self._output:
            self._output.update(self._progress)


def _is_in_notebook() -> bool:
    """Return whether this process is a notebook's kernel. Its forks cannot display: they have no kernel."""
    ipython = sys.modules.get("IPython")
    kernel = getattr(ipython.get_ipython(), "kernel", None) if ipython else None
    return kernel is not None and kernel.session.pid == os.getpid()


def _learning_rate(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the learning rate, or the least and the greatest of several; nothing if one is a tensor."""
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    # Reading a tensor would wait for the device, at every update of the bar.
    if not rates or not all(isinstance(rate, int | float) for rate in rates):
        return {}
    return {"lr": " to ".join(f"{rate:.3g}" for rate in sorted({min(rates), max(rates)}))}


def _numbers(values: Mapping[str, float | str]) -> str:
    return "  ".join(
        f"{name} {value if isinstance(value, str) else format(value, '.4g')}"
        for name, value in values.items()
    )
