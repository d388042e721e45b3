"""The listener that writes scalars for TensorBoard. Heavy: imported in the replica that writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyxla.errors import UsageError, pip_install
from polyxla.hookspecs import hookimpl

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise UsageError(
        "TensorBoard is not installed",
        where="Trainer(log_dir=...)",
        fix=f"Install it: {pip_install('polyxla-training[tensorboard]')}, or pass log_dir=None.",
    ) from error

if TYPE_CHECKING:
    from polyxla_training.observe.logged_values import LoggedValues


class TensorBoardListener:
    """Writes what steps and evaluations log.

    Args:
        log_dir: directory of the event file; made if it is missing.
        logged_values: reads the tensors.
    """

    def __init__(self, log_dir: str, logged_values: LoggedValues) -> None:
        self._logged_values = logged_values
        self._unwritten: tuple[int, Mapping[str, Any]] | None = None
        self._writer = SummaryWriter(log_dir)

    @hookimpl
    def polyxla_step_finished(self, step: int, logged: Mapping[str, Any]) -> None:
        """Write the values of the first step and of every n-th."""
        self._unwritten = (step, logged)
        if self._logged_values.is_due(step):
            self._write_step()

    def _write_step(self) -> None:
        if self._unwritten is not None:
            step, logged = self._unwritten
            self._unwritten = None
            self._write(step, self._logged_values.read(step, logged))

    @hookimpl
    def polyxla_fit_finished(self) -> None:
        """Write the values of the last step, whose number may be no multiple of n."""
        self._write_step()

    @hookimpl
    def polyxla_metrics_ready(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write an evaluation's means."""
        self._write(step, metrics)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    @hookimpl
    def polyxla_replica_stopped(self) -> None:
        """Write the buffered values and close the file, also after an error."""
        self._writer.close()
