"""The loggers of ``Trainer(loggers=...)``, and the listener that passes them what a training logs.

Each logger imports its library when it is made: only the replica that writes needs it, and only if it is
asked for.
"""

from __future__ import annotations

import csv
import functools
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from polyxla import UsageError, hookimpl
from polyxla.plugin import pip_install
from polyxla_training.observe.run_log import Expendable

if TYPE_CHECKING:
    from polyxla_training.observe.step_counters import LoggedValues

METRICS_FILE = "metrics.csv"
COLUMNS = ("step", "name", "value")
DEFAULT_EXPERIMENT = "Default"
LONGEST_PARAM = 500
"""Characters of a parameter's value. Source: MLflow's oldest servers, which refuse longer ones."""


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
        # Kept unread: only the last step's values are written at the end, and reading each would wait for
        # the device.
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
        # A module may write through self.logger after the log is lost.
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
        if metrics:
            self.write(step, metrics)

    @hookimpl
    def polyxla_replica_stopped(self, error: BaseException | None) -> None:
        """Write the buffered values and end the run, also after an error."""
        with self._log.attempt():
            self._logger.close(error)


class CsvLogger:
    """Writes a row for each value, at once; a resumed training appends to the file.

    The columns are fixed. A column per name would need a new header, and new rows, whenever a name first
    appears.

    Args:
        log_dir: directory of the file `METRICS_FILE`; made if it is missing.
    """

    def __init__(self, log_dir: str) -> None:
        path = Path(log_dir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        # Line buffering: a killed run keeps every row that it has written.
        self._file = path.open("a", newline="", buffering=1)
        self._writer = csv.writer(self._file, lineterminator="\n")
        if self._file.tell() == 0:
            self._writer.writerow(COLUMNS)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write a row for each value."""
        self._writer.writerows((step, name, value) for name, value in values.items())

    def close(self, error: BaseException | None) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardLogger:
    """Writes an event file.

    Args:
        log_dir: directory of the file; made if it is missing.
        arguments: further ones of torch's ``SummaryWriter``.

    Raises:
        UsageError: TensorBoard is not installed.
    """

    def __init__(self, log_dir: str, **arguments: Any) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                "TensorBoard is not installed",
                where="Trainer(log_dir=...)",
                fix=f"Install it: {pip_install('polyxla-training[tensorboard]')}, or pass log_dir=None.",
            ) from error
        _leave_errors_to_callers()
        self.experiment = SummaryWriter(log_dir, **arguments)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write a scalar for each value."""
        for name, value in values.items():
            self.experiment.add_scalar(name, value, step)

    def close(self, error: BaseException | None) -> None:
        """Close the file."""
        self.experiment.close()


@functools.cache
def _leave_errors_to_callers() -> None:
    """Make TensorBoard's thread print no error: the next call of the writer raises it."""
    # TensorBoard writes in a thread of its own. Python would print that thread's traceback, although the
    # caller gets the same error at its next call, and reports it in a line.
    before = threading.excepthook

    def report(failure: threading.ExceptHookArgs) -> None:
        if type(failure.thread).__module__.partition(".")[0] != "tensorboard":
            before(failure)

    threading.excepthook = report


class WandbLogger:
    """Writes a run of Weights & Biases.

    wandb accepts no lower step than the last, so what a crashed run wrote after its checkpoint stays.

    Args:
        log_dir: directory of wandb's files; None: wandb's own.
        settings: the Trainer's options and the module's hyper-parameters, for the run's configuration.
        arguments: those of ``wandb.init``, such as ``project``, ``name``, and ``mode="offline"``.

    Raises:
        UsageError: wandb is not installed.
    """

    def __init__(self, log_dir: str | None, settings: Mapping[str, Any], **arguments: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _not_installed("wandb", "wandb") from error
        # The user's own arguments come last, so they replace the defaults.
        given = {"dir": log_dir, "config": dict(settings), **arguments}
        self.experiment = wandb.init(**given)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values."""
        self.experiment.log(dict(values), step=step)

    def close(self, error: BaseException | None) -> None:
        """Finish the run: as failed after an error."""
        self.experiment.finish(exit_code=0 if error is None else 1)


class MlflowLogger:
    """Writes a run of MLflow by a client of its own, which changes nothing global in MLflow.

    Args:
        settings: the Trainer's options and the module's hyper-parameters, for the run's parameters.
        tracking_uri: the server, or a store such as ``sqlite:///mlflow.db``; default: as MLflow chooses, by
            MLFLOW_TRACKING_URI.
        experiment_name: made if it is missing.
        run_name: default: a name that MLflow makes.

    Raises:
        UsageError: MLflow is not installed.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        tracking_uri: str | None = None,
        experiment_name: str = DEFAULT_EXPERIMENT,
        run_name: str | None = None,
    ) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except ImportError as error:
            raise _not_installed("MLflow", "mlflow") from error
        # Kept, so that write() does not import MLflow again.
        self._metric = Metric
        self.experiment = MlflowClient(tracking_uri)
        # MLflow has no call that finds or creates an experiment.
        found = self.experiment.get_experiment_by_name(experiment_name)
        experiment = found.experiment_id if found else self.experiment.create_experiment(experiment_name)
        self._run_id: str = self.experiment.create_run(experiment, run_name=run_name).info.run_id
        params = [Param(name, str(value)[:LONGEST_PARAM]) for name, value in settings.items()]
        self.experiment.log_batch(self._run_id, params=params)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values."""
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(name, value, now_ms, step) for name, value in values.items()]
        self.experiment.log_batch(self._run_id, metrics=metrics)

    def close(self, error: BaseException | None) -> None:
        """End the run: as failed after an error."""
        self.experiment.set_terminated(self._run_id, "FINISHED" if error is None else "FAILED")


def _not_installed(name: str, extra: str) -> UsageError:
    return UsageError(
        f"{name} is not installed",
        where="Trainer(loggers=...)",
        fix=f"Install it: {pip_install(f'polyxla-training[{extra}]')}.",
    )
