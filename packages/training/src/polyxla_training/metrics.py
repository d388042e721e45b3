"""The values that a module logs: those of the current step, and means over an epoch, kept on the device."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from polyxla.errors import UsageError
from polyxla.replica.host_batches import count_records

if TYPE_CHECKING:
    from polyxla.replica.replica import Replica


class MetricAccumulator:
    """Collects ``log(name, value)`` calls without waiting for the device.

    Attributes:
        latest: the values that the current step logged, by name.
        batch_size: number of real records in the current batch, which is the weight of its values.
        valid: mask of its real records, bool ``[record]``; None if all are real.
        is_training: whether values belong to steps (True) or to an evaluation's means (False).
    """

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}
        self.batch_size = 1
        self.valid: torch.Tensor | None = None
        self.is_training = True
        self._records = 0
        self._objects: dict[str, Any] = {}
        self._totals: dict[str, Any] = {}
        self._weights: dict[str, float] = {}

    def start_batch(
        self, batch: Any, is_training: bool, real: int | None = None, valid: torch.Tensor | None = None
    ) -> None:
        """Drop the last step's values and take the weight of the next batch.

        Args:
            batch: the records.
            is_training: whether its values belong to a step.
            real: number of records that are not padding; None for all.
            valid: mask of those records.
        """
        self.latest = {}
        self.is_training = is_training
        self.valid = valid
        self._records = count_records(batch) or 1
        self.batch_size = self._records if real is None else real

    def end_batches(self) -> None:
        """Add what an epoch's last hook logs to the means, with a weight of 1."""
        self.is_training = False
        self.batch_size = self._records = 1
        self.valid = None

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
            value: a number; a tensor of one element, or of one per record, which is averaged over the real
                records; or a metric object such as torchmetrics'.
            prog_bar: ignored, progress shows every value; third because it is in Lightning.
            on_epoch: report its mean over the epoch; default: only in an evaluation.
            batch_size: its weight in the mean; default: the batch's first dimension.

        Raises:
            UsageError: the value is of another kind.
        """
        if callable(getattr(value, "compute", None)):
            self._objects[name] = value
            return
        value = self._mean_of_records(value) if self._is_by_record(value) else _scalar(name, value)
        self.latest[name] = value
        weight = self.batch_size if batch_size is None else batch_size
        # A batch of padding only, made because other replicas have records left, has a weight of 0.
        if weight and (on_epoch if on_epoch is not None else not self.is_training):
            self._add(name, value, weight)

    def _is_by_record(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == (self._records,) and value.numel() > 1

    def _mean_of_records(self, value: torch.Tensor) -> torch.Tensor:
        value = _at_least_float32(value.detach())
        if self.valid is not None:
            # Not a product with the mask: the value of a padding record may be infinite.
            value = torch.where(self.valid, value, torch.zeros_like(value))
        return value.sum() / max(self.batch_size, 1)

    def _add(self, name: str, value: Any, weight: int) -> None:
        if name not in self._totals:
            # Uploaded, not made on the device: a lazily made zero would be a constant of the first batch's
            # program, which then differs from all later ones and is compiled separately. With a dimension,
            # because torch_xla makes an uploaded scalar of 0 or 1 a constant too.
            zero = torch.zeros(1)
            self._totals[name] = zero.to(value.device) if isinstance(value, torch.Tensor) else 0.0
            self._weights[name] = 0.0
        if isinstance(value, torch.Tensor):
            # In float16, a loss of 700 times a batch size of 128 overflows.
            value = _at_least_float32(value)
        self._totals[name] = self._totals[name] + value * weight
        self._weights[name] += weight

    def log_dict(self, values: Mapping[str, Any], **options: Any) -> None:
        """Log several values by name."""
        for name, value in values.items():
            self.log(name, value, **options)

    def take(self, replica: Replica) -> dict[str, float]:
        """Return the means over every replica's records since the last call, and reset them.

        A collective. Waits for the device. Metric objects are computed and reset; they cover one replica's
        records.

        Raises:
            UsageError: metric objects were logged on several replicas: their results cannot be averaged.
        """
        computed = self._computed(replica)
        sums = self.state_dict()
        self._totals, self._weights = {}, {}
        gathered = replica.all_gather(sums)
        names = {name for one in gathered for name in one}
        means = {name: _mean([one[name] for one in gathered if name in one]) for name in sorted(names)}
        return means | computed

    def state_dict(self) -> dict[str, tuple[float, float]]:
        """Return the epoch's totals and weights so far, by name. Waits for the device."""
        return {name: (float(total), self._weights[name]) for name, total in self._totals.items()}

    def load_state_dict(self, state: Mapping[str, tuple[float, float]]) -> None:
        """Continue from `state_dict`."""
        self._totals = {name: total for name, (total, _) in state.items()}
        self._weights = {name: weight for name, (_, weight) in state.items()}

    def _computed(self, replica: Replica) -> dict[str, float]:
        objects, self._objects = self._objects, {}
        if objects and replica.world_size > 1:
            raise UsageError(
                f"metric objects cannot be combined over {replica.world_size} replicas: {sorted(objects)}",
                where="self.log",
                fix="Log the batch's value instead, such as its accuracy: the mean over batches is exact.",
            )
        values = {name: float(metric.compute()) for name, metric in objects.items()}
        for metric in objects.values():
            metric.reset()
        return values


def _at_least_float32(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(()) if value.dim() else value.detach()
    if isinstance(value, numbers.Real):
        return value
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise UsageError(
        f"{name!r} is logged as {kind}",
        where="self.log",
        fix="Log a number, or a tensor of one element or of one per record.",
    )


def _mean(parts: list[tuple[float, float]]) -> float:
    return sum(total for total, _ in parts) / sum(weight for _, weight in parts)
