"""TensorBoard files. Heavy: imported in the replica that writes them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any

from polyxla import UsageError
from polyxla.plugin import pip_install

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise UsageError(
        "TensorBoard is not installed",
        where="Trainer(log_dir=...)",
        fix=f"Install it: {pip_install('polyxla-training[tensorboard]')}, or pass log_dir=None.",
    ) from error


class TensorBoardLogger:
    """Writes an event file.

    Args:
        log_dir: directory of the file; made if it is missing.
        arguments: further ones of torch's ``SummaryWriter``.
    """

    def __init__(self, log_dir: str, **arguments: Any) -> None:
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
    before = threading.excepthook

    def report(failure: threading.ExceptHookArgs) -> None:
        if type(failure.thread).__module__.partition(".")[0] != "tensorboard":
            before(failure)

    threading.excepthook = report
