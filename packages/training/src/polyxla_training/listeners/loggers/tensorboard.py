"""TensorBoard files. Heavy: imported in the replica that writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyxla.errors import UsageError, pip_install

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
        self._writer = SummaryWriter(log_dir, **arguments)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write a scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, error: BaseException | None) -> None:
        """Close the file."""
        self._writer.close()
