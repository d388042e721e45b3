"""Runs of MLflow. Heavy: imported in the replica that writes them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from polyxla import UsageError
from polyxla.plugin import pip_install

try:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param
except ImportError as error:
    raise UsageError(
        "MLflow is not installed",
        where="Trainer(loggers=...)",
        fix=f"Install it: {pip_install('polyxla-training[mlflow]')}.",
    ) from error

DEFAULT_EXPERIMENT = "Default"
LONGEST_PARAM = 500
"""Characters of a parameter's value. Source: MLflow's oldest servers, which refuse longer ones."""


class MlflowLogger:
    """Writes a run by a client of its own, which changes nothing global in MLflow.

    Args:
        settings: the Trainer's options and the module's hyper-parameters, for the run's parameters.
        tracking_uri: the server, or a store such as ``sqlite:///mlflow.db``; default: as MLflow chooses, by
            MLFLOW_TRACKING_URI.
        experiment_name: made if it is missing.
        run_name: default: a name that MLflow makes.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        tracking_uri: str | None = None,
        experiment_name: str = DEFAULT_EXPERIMENT,
        run_name: str | None = None,
    ) -> None:
        self.experiment = MlflowClient(tracking_uri)
        found = self.experiment.get_experiment_by_name(experiment_name)
        experiment = found.experiment_id if found else self.experiment.create_experiment(experiment_name)
        self._run_id: str = self.experiment.create_run(experiment, run_name=run_name).info.run_id
        params = [Param(name, str(value)[:LONGEST_PARAM]) for name, value in settings.items()]
        self.experiment.log_batch(self._run_id, params=params)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values."""
        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, now_ms, step) for name, value in values.items()]
        self.experiment.log_batch(self._run_id, metrics=metrics)

    def close(self, error: BaseException | None) -> None:
        """End the run: as failed after an error."""
        self.experiment.set_terminated(self._run_id, "FINISHED" if error is None else "FAILED")
