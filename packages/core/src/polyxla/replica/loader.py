"""`Loader`: the batches of one replica's records, on its device.

On the host, batches are checked, trimmed or padded, and split into the tensors to upload and the pytree
around them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from polyxla.errors import UsageError
from polyxla.pytree import is_tensor, leaves_with_paths, map_tensors, tensors_in, with_tensors
from polyxla.replica import random_state

if TYPE_CHECKING:
    import torch

    from polyxla.contracts.replication import Replication


class LoaderShard(Protocol):
    """A loader that a `polyxla_shard_loader` plugin returns. Only `__iter__` is required.

    Attributes:
        batch_size: number of records in a full batch; None if batches differ.
        note: a sentence about what the plugin did, printed once; empty for none.
    """

    batch_size: int | None
    note: str

    def __len__(self) -> int:
        """Return the number of batches of the next iteration, after a `load_state_dict` of what is left."""

    def __iter__(self) -> Iterator[Any]:
        """Read one epoch; the next call reads the next epoch."""

    def marked(self) -> Iterator[tuple[Any, bool]]:
        """Read one epoch, and tell of each batch whether it only repeats records of others.

        All replicas get the same number of batches.
        """

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration read this epoch."""

    def state_dict(self, batches: int) -> dict[str, Any]:
        """Return the position after `batches` batches of the latest iteration, as JSON-compatible values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration begin at this position."""


class Loader:
    """A loader whose batches arrive on the device. Iterate over it once per epoch.

    Position and totals count the batches that the loop has received, not those that are read ahead. Reading
    ahead happens in threads of the runtime, everything else in the replica's thread.

    Args:
        source: the batches on the host.
        options: how to read them.
        replication: uploads them to the device.
        before_batch: called when the loop requests a batch, before it waits.
        parts: among how many replicas the program has divided the records itself; None if it has not.

    Attributes:
        batch: the latest batch, on the device; None before the first.
        valid: which records of that batch are real, bool ``[record]`` on the device; None without ``pad``.
        real: number of real records of that batch.
        is_repeat: whether that batch only repeats records, because other replicas have another batch.
        batches: number of batches received so far.
        records: number of records received so far, without padding.
        waited_s: total wait of the loop for batches, in seconds.
    """

    def __init__(
        self,
        source: Iterable[Any],
        options: ReadOptions,
        replication: Replication,
        before_batch: Callable[[Loader], None],
        parts: int | None = None,
    ) -> None:
        self._source, self._options, self._replication = source, options, replication
        self._before_batch, self._parts = before_batch, parts
        self._position = LoaderPosition()
        self._all_valid: Any = None
        self.batch: Any = None
        self.valid: Any = None
        self.real = self.batches = self.records = 0
        self.is_repeat = False
        self.waited_s = 0.0

    def __len__(self) -> int:
        # Fewer than are to be skipped, if the data has become shorter since the position was saved.
        return max(len(self._source) - self._position.skip, 0)  # type: ignore[arg-type]

    def __iter__(self) -> Generator[Any, None, None]:
        skip = self._position.begin()
        # The iterator is made here, in the replica's thread: a DataLoader then forks its workers from it, and
        # an error of the dataset is raised in it. A DataLoader also draws a random number; in a resumed epoch
        # the earlier run has drawn that number already, so the generators must not advance again.
        with random_state.preserved_host_state() if self._position.before else nullcontext():
            marked = getattr(self._source, "marked", None)
            batches = marked() if marked else zip(self._source, itertools.repeat(False))
            batches = itertools.islice(batches, skip, None)
        host = HostBatches(batches, _batch_size(self._source), self._options)
        moves, prefetch = self._options.transfer is not None, self._options.prefetch
        ahead = iter(host) if moves else self._replication.upload(iter(host), prefetch)
        # Closing ends the runtime's threads, also when the loop is left early.
        with closing(ahead) as arriving:
            while (arrived := self._next(arriving)) is not None:
                self._take(host, *arrived)
                yield self.batch

    def _next(self, arriving: Iterator[Any]) -> Any:
        self._before_batch(self)
        started = time.perf_counter()
        arrived = next(arriving, None)
        self.waited_s += time.perf_counter() - started
        return arrived

    def _take(self, host: HostBatches, number: int, tensors: list[Any]) -> None:
        pending = host.take(number)
        if self._options.pad:
            # `HostBatches` has sent the mask behind the batch's own tensors.
            self.valid = tensors.pop() if pending.has_mask else self._full_mask(host.size or 0)
        self.batch = with_tensors(pending.batch, tensors)
        if (move := self._options.transfer) is not None:
            self.valid, self.batch = self._replication.to_device(self.valid), move(self.batch)
        self._position.received += 1
        self.batches += 1
        self.records += pending.records
        self.real = pending.records
        self.is_repeat = pending.is_repeat

    def _full_mask(self, records: int) -> Any:
        # Uploaded once, because most batches are full.
        if self._all_valid is None:
            import torch

            self._all_valid = self._replication.to_device(torch.ones(records, dtype=torch.bool))
        return self._all_valid

    def finish_epoch(self) -> None:
        """Count the epoch as finished, so that a run that resumes from here begins the next epoch.

        Starting the next iteration does the same. Until then the position is after the last batch received.
        """
        if not self._position.is_begun and hasattr(self._source, "set_epoch"):
            # The source is still where `load_state_dict` has put it: the rest of that epoch is unread.
            self._source.set_epoch(self._position.epoch + 1)
        self._position.end()

    @property
    def batches_before(self) -> int:
        """Number of batches of the current epoch that an earlier run, before a resume, received.

        If the earlier run's batches had another size, or it had another number of replicas: how many of this
        run's batches that were.
        """
        return self._position.before

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, and the number of its batches that the loop has received.

        The values are JSON-compatible and the same in every replica. Another number of replicas can resume
        from them if the plugin that divides the records supports it.
        """
        position = self._position
        batches = position.before + position.received
        state = {"epoch": position.epoch, "batches": batches}
        if self._parts is not None:
            state["parts"] = self._parts
        if batches and hasattr(self._source, "state_dict"):
            state["source"] = self._source.state_dict(position.received)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration resume where `state_dict` was called.

        A source that cannot resume is read from its start, and the batches before the position are skipped.

        Raises:
            UsageError: the program divided the records among another number of replicas then.
        """
        # This comes first: a position that is refused must leave the loader as it is.
        if state["batches"] and state.get("parts") != self._parts:
            raise UsageError(
                f"the records were divided {_by(state.get('parts'))} when the position was saved, and are "
                f"divided {_by(self._parts)} now",
                where="replica.loader(..., divided=True)",
                fix="Resume with as many replicas as then, or from the end of an epoch.",
            )
        position = self._position = LoaderPosition(epoch=state["epoch"], before=state["batches"])
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(position.epoch)
        if "source" in state and hasattr(self._source, "load_state_dict"):
            length = _length(self._source)
            self._source.load_state_dict(state["source"])
            left = _length(self._source)
            # The saved number counts batches of the earlier run's size and replicas. It stays where not even
            # one of this run's batches is gone: the epoch has begun.
            if length is not None and left is not None and left < length:
                position.before = length - left
        else:
            position.skip = position.before


@dataclass
class LoaderPosition:
    """A loop's position in its data.

    Attributes:
        epoch: number of the current iteration's epoch, or of the next one's.
        before: batches of that epoch that an earlier run received.
        received: batches of that epoch that this run has received.
        skip: batches to skip when the iteration begins.
        is_begun: whether the epoch's iteration has begun.
    """

    epoch: int = 0
    before: int = 0
    received: int = 0
    skip: int = 0
    is_begun: bool = False

    def begin(self) -> int:
        """Begin an iteration; return the number of batches to skip."""
        if self.is_begun:
            # End the previous epoch, even if the loop left it early: its source has also moved on.
            self.end()
        self.is_begun = True
        # Only the first iteration after a resume skips batches.
        skip, self.skip = self.skip, 0
        return skip

    def end(self) -> None:
        """Move to the start of the next epoch."""
        self.epoch += 1
        self.before = self.received = self.skip = 0
        self.is_begun = False


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except TypeError:
        return None


def _batch_size(source: Any) -> int | None:
    size = getattr(source, "batch_size", None)
    return size if isinstance(size, int) else None


def _by(parts: int | None) -> str:
    return "by the sampler" if parts is None else f"among {parts} replica(s) by the program"


@dataclass(frozen=True)
class ReadOptions:
    """Options of `polyxla.Replica.loader`.

    Attributes:
        pad: whether every batch gets the shape of a full one, with a mask of its real records.
        even: whether batches that only repeat records arrive too, so that all replicas get equally many; with
            `pad` they do.
        prefetch: how far to copy ahead, by the runtime's option names.
        transfer: copies a batch to the device, in the loop's thread; None: the runtime copies ahead.
    """

    pad: bool
    even: bool
    prefetch: Mapping[str, int]
    transfer: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class PendingBatch:
    """A batch whose tensors are on their way to the device.

    Attributes:
        batch: the pytree on the host.
        records: number of its real records, without padding.
        is_repeat: whether it only repeats records.
        has_mask: whether the last uploaded tensor is the mask of real records.
    """

    batch: Any
    records: int
    is_repeat: bool
    has_mask: bool


class HostBatches:
    """Splits batches: the tensors are uploaded, the pytree around them waits here.

    Batches that only repeat records are left out, unless the options say otherwise.

    A thread of the runtime iterates over it, while the replica's thread calls `take` for the batches that
    have arrived.

    Args:
        batches: the user's batches, and of each whether it only repeats records.
        batch_size: number of records in a full batch; None if the first batch is a full one.
        options: how to read.

    Attributes:
        size: number of records in a full batch; None before the first batch.
    """

    def __init__(
        self, batches: Iterator[tuple[Any, bool]], batch_size: int | None, options: ReadOptions
    ) -> None:
        self._batches = batches
        self.size = batch_size
        self._options = options
        # Written by the runtime's thread, popped by the replica's; single dict operations need no lock.
        self._pending: dict[int, PendingBatch] = {}

    def __iter__(self) -> Generator[tuple[int, list[Any]]]:
        for number, (batch, is_repeat) in enumerate(self._batches):
            if number == 0 and self._options.transfer is None:
                check(batch)
            records = count_records(batch)
            # Without a batch size, the first batch counts as a full one.
            self.size = self.size or records
            if self._options.pad:
                if records is None:
                    raise UsageError(
                        "a batch without tensors cannot be padded",
                        where="the loader's batch",
                        fix="Return tensors from collate_fn, or read without pad=True: "
                        "the Trainer pads for a step that has a parameter `valid`.",
                    )
                padded, mask = self._pad(batch, records, 0 if is_repeat else records)
                yield self._send(number, padded, records, is_repeat, mask)
            elif self._options.even or not is_repeat:
                yield self._send(number, batch, records or 0, is_repeat, None)

    def _pad(self, batch: Any, records: int, real: int) -> tuple[Any, torch.Tensor | None]:
        size = self.size or records
        if real == size == records:
            return batch, None
        import torch

        mask = torch.arange(size) < real
        return map_tensors(lambda tensor: _pad_tensor(tensor, records, size), batch), mask

    def _send(
        self, number: int, batch: Any, records: int, is_repeat: bool, mask: Any
    ) -> tuple[int, list[Any]]:
        real = 0 if is_repeat else records
        self._pending[number] = PendingBatch(batch, real, is_repeat, mask is not None)
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


def _pad_tensor(tensor: Any, records: int, size: int) -> Any:
    if not tensor.dim() or tensor.shape[0] != records or records >= size:
        return tensor
    # Repeat the last record: the model can compute with it, whereas zeros may cause a division by zero.
    return tensor[[*range(records), *[records - 1] * (size - records)]]


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
