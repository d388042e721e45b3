"""What a module logs: the last values of the step, and means over an epoch kept on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from polyxla.replica import Replica


class Meter:
    """Collects ``log(name, value)`` calls without ever waiting for the device.

    Attributes:
        latest: what the current step logged, by name.
        batch_size: records in the current batch, the weight of its values.
        is_training: whether values belong to steps (True) or to an evaluation's means (False).
    """

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}
        self.batch_size = 1
        self.is_training = True
        self._totals: dict[str, Any] = {}
        self._weights: dict[str, float] = {}

    def start_batch(self, batch: Any, is_training: bool) -> None:
        """Forget the last step's values and take the weight of the next batch."""
        self.latest = {}
        self.is_training = is_training
        self.batch_size = _records(batch) or 1

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        *,
        on_epoch: bool | None = None,
        batch_size: int | None = None,
        **_: Any,
    ) -> None:
        """Log one value.

        Args:
            name: its name.
            value: a number or a tensor of one element.
            prog_bar: third, as Lightning has it; progress shows every value.
            on_epoch: whether to report its mean over the epoch; default: only in evaluation.
            batch_size: its weight in the mean; default: the batch's first dimension.
        """
        if isinstance(value, torch.Tensor):
            value = value.detach()
        self.latest[name] = value
        if on_epoch if on_epoch is not None else not self.is_training:
            self._add(name, value, batch_size or self.batch_size)

    def _add(self, name: str, value: Any, weight: int) -> None:
        if name not in self._totals:
            # Uploaded, not made on the device: a lazily made zero is a constant of the first batch's
            # program, which would then differ from all later ones and be compiled for itself.
            zero = torch.zeros(())
            self._totals[name] = zero.to(value.device) if isinstance(value, torch.Tensor) else 0.0
            self._weights[name] = 0.0
        if isinstance(value, torch.Tensor):
            # In float16, a loss of 700 in a batch of 128 is already infinite.
            value = value.to(torch.promote_types(value.dtype, torch.float32))
        self._totals[name] = self._totals[name] + value * weight
        self._weights[name] += weight

    def log_dict(self, values: Mapping[str, Any], **options: Any) -> None:
        """Log several values by name."""
        for name, value in values.items():
            self.log(name, value, **options)

    def take(self, replica: Replica) -> dict[str, float]:
        """Return the means over every replica's records since the last call, and start anew.

        A collective: every replica calls it at the same point. Waits for the device.
        """
        sums = {name: (float(self._totals[name]), self._weights[name]) for name in self._totals}
        self._totals, self._weights = {}, {}
        everyone = replica.all_gather(sums)
        names = {name for one in everyone for name in one}
        return {name: _mean([one[name] for one in everyone if name in one]) for name in sorted(names)}


def _mean(parts: list[tuple[float, float]]) -> float:
    return sum(total for total, _ in parts) / sum(weight for _, weight in parts)


def _records(batch: Any) -> int | None:
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((found for part in parts if (found := _records(part)) is not None), None)
