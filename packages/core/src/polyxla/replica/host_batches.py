"""Batches on the host: checked, trimmed or padded, and split into tensors to upload and their pytree."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyxla.errors import UsageError
from polyxla.pytree import is_tensor, leaves_with_paths, map_tensors, tensors_in

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ReadOptions:
    """Options of `polyxla.Replica.loader`.

    Attributes:
        pad: whether every batch gets the shape of a full one, with a mask of its real records.
        repeat: whether repeated records count like all others (training) or are left out (evaluation).
        prefetch: how far to copy ahead, by the runtime's option names.
        transfer: copies a batch to the device, in the loop's thread; None: the runtime copies ahead.
    """

    pad: bool
    repeat: bool
    prefetch: Mapping[str, int]
    transfer: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class PendingBatch:
    """A batch whose tensors are on their way to the device.

    Attributes:
        batch: the pytree on the host.
        records: number of its real records, without padding.
        has_mask: whether the last uploaded tensor is the mask of real records.
    """

    batch: Any
    records: int
    has_mask: bool


class HostBatches:
    """Splits batches: the tensors are uploaded, the pytree around them waits here.

    A thread of the runtime iterates over it, while the replica's thread calls `take` for the batches that
    have arrived.

    Args:
        batches: the user's batches.
        batch_size: number of records in a full batch; None if the first batch is a full one.
        valid_records: number of non-repeated records; None if none repeat.
        options: how to read.

    Attributes:
        size: number of records in a full batch; None before the first batch.
    """

    def __init__(
        self, batches: Iterator[Any], batch_size: int | None, valid_records: int | None, options: ReadOptions
    ) -> None:
        self._batches = batches
        self.size = batch_size
        self._valid = valid_records
        self._options = options
        self._seen = 0
        # Written by the runtime's thread, popped by the replica's; single dict operations need no lock.
        self._pending: dict[int, PendingBatch] = {}

    def __iter__(self) -> Generator[tuple[int, list[Any]]]:
        for number, batch in enumerate(self._batches):
            if number == 0 and self._options.transfer is None:
                check(batch)
            records = count_records(batch) or 0
            self.size = self.size or records
            real = self._count_real(records)
            if self._options.pad:
                padded, mask = self._pad(batch, records, real)
                yield self._send(number, padded, real, mask)
            elif real > 0 or records == 0:
                yield self._send(number, _trim(batch, records, real), real, None)

    def _count_real(self, records: int) -> int:
        if self._valid is None or self._options.repeat:
            return records
        real = min(max(self._valid - self._seen, 0), records)
        self._seen += records
        return real

    def _pad(self, batch: Any, records: int, real: int) -> tuple[Any, torch.Tensor | None]:
        size = self.size or records
        if real == size == records:
            return batch, None
        import torch

        mask = torch.arange(size) < real
        return map_tensors(lambda tensor: _pad_tensor(tensor, records, size), batch), mask

    def _send(self, number: int, batch: Any, records: int, mask: Any) -> tuple[int, list[Any]]:
        self._pending[number] = PendingBatch(batch, records, mask is not None)
        return number, tensors_in(batch) + ([] if mask is None else [mask])

    def take(self, number: int) -> PendingBatch:
        """Remove and return the batch with this number, whose tensors have arrived."""
        return self._pending.pop(number)


def count_records(batch: Any) -> int | None:
    """Return the first dimension of a batch's first tensor; None if the batch has no tensor."""
    # Nearly every batch begins with a tensor; walking the pytree with paths takes ten times as long.
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    for _, value in [("", first)] if is_tensor(first) else leaves_with_paths(batch):
        if is_tensor(value):
            return value.shape[0] if value.dim() else 1
    return None


def _trim(batch: Any, records: int, real: int) -> Any:
    if real == records:
        return batch
    return map_tensors(lambda tensor: tensor[:real] if _has_records(tensor, records) else tensor, batch)


def _pad_tensor(tensor: Any, records: int, size: int) -> Any:
    if not _has_records(tensor, records) or records >= size:
        return tensor
    # Repeat the last record: the model can compute with it, whereas zeros may cause a division by zero.
    return tensor[[*range(records), *[records - 1] * (size - records)]]


def _has_records(tensor: Any, records: int) -> bool:
    return bool(tensor.dim()) and tensor.shape[0] == records


def check(batch: Any) -> None:
    """Refuse a batch with tensors inside objects that are not pytrees, which would stay on the host.

    Raises:
        UsageError: an object other than a list, tuple, dict or dataclass holds tensors.
    """
    for path, value in leaves_with_paths(batch):
        hidden = value if isinstance(value, set | frozenset) else getattr(value, "__dict__", {}).values()
        if not is_tensor(value) and any(is_tensor(item) for item in hidden):
            raise UsageError(
                f"{path} is a {type(value).__qualname__} that holds tensors, which would stay on the host",
                where="the loader's batch",
                fix="Return lists, tuples, dicts or dataclasses of tensors from collate_fn.",
            )
