"""Scalars for TensorBoard. Heavy: imported in the replica that writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyxla.console import say
from polyxla.errors import UsageError
from polyxla.hookspecs import hookimpl

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise UsageError(
        "TensorBoard is not installed",
        where="Trainer(log_dir=...)",
        fix="Install it: pip install 'polyxla-core[tensorboard]', or pass log_dir=None.",
    ) from error

if TYPE_CHECKING:
    from polyxla_training.observe.logged_values import Readings


class TensorBoard:
    """A listener that writes what steps and evaluations log.

    Args:
        folder: where the event file goes; made where it is missing.
        every_n_steps: how often steps' tensors are read, which waits for the device.
        readings: reads them.
    """

    def __init__(self, folder: str, every_n_steps: int, readings: Readings) -> None:
        self._every = every_n_steps
        self._readings = readings
        self._writer = SummaryWriter(folder)
        say(f"logging to {folder}; look at it with: tensorboard --logdir {folder}")

    @hookimpl
    def polyxla_step_finished(self, step: int, logged: Mapping[str, Any]) -> None:
        """Write every n-th step's values."""
        if step % self._every == 0:
            self._write(step, self._readings.of(step, logged))

    @hookimpl
    def polyxla_metrics_ready(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write an evaluation's means."""
        self._write(step, metrics)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    @hookimpl
    def polyxla_replica_stopped(self) -> None:
        """Write what is buffered and close the file, also after an error."""
        self._writer.close()
