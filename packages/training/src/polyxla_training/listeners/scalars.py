"""The listener that passes logged values to a logger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from polyxla import hookimpl
from polyxla_training.observe.run_log import Expendable

if TYPE_CHECKING:
    from polyxla_training.observe.logged_values import LoggedValues


class Logger(Protocol):
    """Writes values somewhere. Belongs to the replica's thread."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step, or of an evaluation after it."""

    def close(self, error: BaseException | None) -> None:
        """End the run; `error` is what ended the training, if it failed."""


class ScalarListener:
    """Writes what steps and evaluations log.

    Args:
        logger: writes it.
        logged_values: reads the tensors of some steps, which waits for the device.
        name: the logger's, for the line that reports its loss.

    Attributes:
        name: as given.
    """

    def __init__(self, logger: Logger, logged_values: LoggedValues, name: str) -> None:
        self._logger, self._logged_values = logger, logged_values
        self._log = Expendable(f"the log of {name!r}")
        self.name = name
        self._unwritten: tuple[int, Mapping[str, Any]] | None = None

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
            self.write(step, self._logged_values.read(step, logged))

    @property
    def experiment(self) -> Any:
        """What the logger's library offers, such as TensorBoard's ``SummaryWriter``."""
        return getattr(self._logger, "experiment", self._logger)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write values, until an error has ended the log."""
        if not self._log.is_lost:
            with self._log.attempt():
                self._logger.write(step, values)

    @hookimpl
    def polyxla_fit_finished(self) -> None:
        """Write the values of the last step, whose number may be no multiple of n."""
        self._write_step()

    @hookimpl
    def polyxla_metrics_ready(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write an evaluation's means."""
        self.write(step, metrics)

    @hookimpl
    def polyxla_replica_stopped(self, error: BaseException | None) -> None:
        """Write the buffered values and end the run, also after an error."""
        with self._log.attempt():
            self._logger.close(error)
