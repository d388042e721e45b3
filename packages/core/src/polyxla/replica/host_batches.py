"""Batches on the host: checked, cut or padded, and taken apart for their way to the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyxla.errors import UsageError
from polyxla.pytree import is_tensor, map_tensors, parts, tensors_in

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Reading:
    """How a loader is read.

    Attributes:
        pad: whether every batch gets the shape of a full one, with a mask of what is real in it.
        repeat: whether records that fill up the last round are like all others (training), or are left out.
        prefetch: how far to copy ahead, in the runtime's own words.
    """

    pad: bool
    repeat: bool
    prefetch: Mapping[str, int]


@dataclass(frozen=True)
class Sent:
    """A batch under way.

    Attributes:
        batch: as it was on the host; its tensors travel.
        records: its real records, without padding.
        has_mask: whether the last tensor that travels is the mask of its real records.
    """

    batch: Any
    records: int
    has_mask: bool


class HostBatches:
    """Takes batches apart: tensors travel, what holds them waits here.

    Iterated over in a thread of the runtime, while the replica's own takes what arrived.

    Args:
        batches: what the person's loader gives.
        batch_size: records in a full batch; None for those of the first.
        valid_records: how many records are no repeats; None for all.
        reading: how to read.

    Attributes:
        size: records in a full batch; None before the first.
    """

    def __init__(
        self, batches: Iterator[Any], batch_size: int | None, valid_records: int | None, reading: Reading
    ) -> None:
        self._batches = batches
        self.size = batch_size
        self._valid = valid_records
        self._reading = reading
        self._seen = 0
        self._sent: dict[int, Sent] = {}

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        for number, batch in enumerate(self._batches):
            if number == 0:
                check(batch)
            records = count_records(batch) or 0
            self.size = self.size or records
            real = self._count_real(records)
            if self._reading.pad:
                padded, mask = self._padded(batch, records, real)
                yield self._send(number, padded, real, mask)
            elif real > 0 or records == 0:
                yield self._send(number, _cut(batch, records, real), real, None)

    def _count_real(self, records: int) -> int:
        if self._valid is None or self._reading.repeat:
            return records
        real = min(max(self._valid - self._seen, 0), records)
        self._seen += records
        return real

    def _padded(self, batch: Any, records: int, real: int) -> tuple[Any, torch.Tensor | None]:
        size = self.size or records
        if real == size == records:
            return batch, None
        import torch

        mask = torch.arange(size) < real
        return map_tensors(lambda tensor: _grown(tensor, records, size), batch), mask

    def _send(self, number: int, batch: Any, records: int, mask: Any) -> tuple[int, list[Any]]:
        self._sent[number] = Sent(batch, records, mask is not None)
        return number, tensors_in(batch) + ([] if mask is None else [mask])

    def take(self, number: int) -> Sent:
        """Return what waited for the tensors with this number."""
        return self._sent.pop(number)


def count_records(batch: Any) -> int | None:
    """Return the first dimension of a batch's first tensor; None where it has no tensor."""
    # In nearly every batch; a walk with paths takes ten times as long.
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    for _, value in [("", first)] if is_tensor(first) else parts(batch):
        if is_tensor(value):
            return value.shape[0] if value.dim() else 1
    return None


def _cut(batch: Any, records: int, real: int) -> Any:
    if real == records:
        return batch
    return map_tensors(lambda tensor: tensor[:real] if _has_records(tensor, records) else tensor, batch)


def _grown(tensor: Any, records: int, size: int) -> Any:
    if not _has_records(tensor, records) or records >= size:
        return tensor
    # The last record again: a value that the model can compute with, unlike zeros that may divide.
    return tensor[[*range(records), *[records - 1] * (size - records)]]


def _has_records(tensor: Any, records: int) -> bool:
    return bool(tensor.dim()) and tensor.shape[0] == records


def check(batch: Any) -> None:
    """Refuse a batch with tensors where they would not be found, and would stay on the host.

    Raises:
        UsageError: an object in it holds tensors and is no list, tuple, dict or dataclass.
    """
    for path, value in parts(batch):
        hidden = value if isinstance(value, set | frozenset) else getattr(value, "__dict__", {}).values()
        if not is_tensor(value) and any(is_tensor(item) for item in hidden):
            raise UsageError(
                f"{path} is a {type(value).__qualname__} that holds tensors, which would stay on the host",
                where="the loader's batch",
                fix="Let collate_fn return lists, tuples, dicts or dataclasses of tensors.",
            )
