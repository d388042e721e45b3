"""Runs of Weights & Biases. Heavy: imported in the replica that writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyxla import UsageError
from polyxla.plugin import pip_install

try:
    import wandb
except ImportError as error:
    raise UsageError(
        "wandb is not installed",
        where="Trainer(loggers=...)",
        fix=f"Install it: {pip_install('polyxla-training[wandb]')}.",
    ) from error


class WandbLogger:
    """Writes a run; what is written before a lower step, as after a crash, stays.

    Args:
        log_dir: directory of wandb's files; None: wandb's own.
        settings: the Trainer's options and the module's hyper-parameters, for the run's configuration.
        arguments: those of ``wandb.init``, such as ``project``, ``name``, and ``mode="offline"``.
    """

    def __init__(self, log_dir: str | None, settings: Mapping[str, Any], **arguments: Any) -> None:
        given = {"dir": log_dir, "config": dict(settings), **arguments}
        self.experiment = wandb.init(**given)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values."""
        self.experiment.log(dict(values), step=step)

    def close(self, error: BaseException | None) -> None:
        """Finish the run: as failed after an error."""
        self.experiment.finish(exit_code=0 if error is None else 1)
