"""What `Replica.loader` returns: batches of this replica's records, on its device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from polyxla.pytree import with_tensors
from polyxla.replica import random_state
from polyxla.replica.host_batches import HostBatches, Reading

if TYPE_CHECKING:
    from polyxla.contracts.replication import Replication


class Source(Protocol):
    """A loader that a `polyxla_shard_loader` plugin made; only iterating over it is required.

    Attributes:
        batch_size: records in a full batch; None where they differ.
        valid_records: how many of this replica's records in the iteration that began last are no repeats,
            which come at its end; None where nobody knows.
        note: a sentence on what was done, which is said once; empty for nothing to say.
    """

    batch_size: int | None
    valid_records: int | None
    note: str

    def __iter__(self) -> Iterator[Any]:
        """Read one epoch, and be ready for the next."""

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that epoch."""

    def state_dict(self, batches: int) -> dict[str, Any]:
        """Return the position after so many batches of the iteration that began last; JSON can hold it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration begin at that position."""


class Loader:
    """A loader whose batches arrive on the device; it can be iterated over again, once an epoch.

    Position and totals count what the loop was given, not what is read ahead. Reading ahead happens in
    threads of the runtime; everything else in the replica's.

    Args:
        source: gives the batches, on the host.
        reading: how.
        replication: brings them to the device.
        before_batch: called whenever the loop asks for a batch, before it waits.

    Attributes:
        batch: the batch that was given last, on the device; None before the first.
        valid: which records of that batch are real, bool ``[record]`` on the device; None without ``pad``.
        real: how many records of that batch are real.
        batches: batches given so far.
        records: records given so far, without padding.
        waited_s: seconds that the loop waited for batches.
    """

    def __init__(
        self,
        source: Iterable[Any],
        reading: Reading,
        replication: Replication,
        before_batch: Callable[[Loader], None],
    ) -> None:
        self._source = source
        self._reading = reading
        self._replication = replication
        self._before_batch = before_batch
        self._position = Position()
        self._all_valid: Any = None
        self.batch: Any = None
        self.valid: Any = None
        self.real = self.batches = self.records = 0
        self.waited_s = 0.0

    def __len__(self) -> int:
        return len(self._source) - self._position.skip  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        skip = self._position.begin()
        # Begun here, in the replica's thread: workers are forked by it, and a bad dataset is told by it.
        # A DataLoader draws a number when it begins, which the run before this one has drawn already.
        with random_state.kept_host() if self._position.before else nullcontext():
            batches = itertools.islice(iter(self._source), skip, None)
        host = HostBatches(batches, _batch_size(self._source), self._valid_records(), self._reading)
        # The threads behind it end with it, also when the loop is left early.
        with closing(self._replication.upload(iter(host), self._reading.prefetch)) as arriving:
            while (arrived := self._next(arriving)) is not None:
                self._take(host, *arrived)
                yield self.batch

    def _valid_records(self) -> int | None:
        return getattr(self._source, "valid_records", None)

    def _next(self, arriving: Iterator[Any]) -> Any:
        self._before_batch(self)
        started = time.perf_counter()
        arrived = next(arriving, None)
        self.waited_s += time.perf_counter() - started
        return arrived

    def _take(self, host: HostBatches, number: int, tensors: list[Any]) -> None:
        sent = host.take(number)
        if self._reading.pad:
            self.valid = tensors.pop() if sent.has_mask else self._full_mask(host.size or 0)
        self.batch = with_tensors(sent.batch, tensors)
        self._position.given += 1
        self.batches += 1
        self.records += sent.records
        self.real = sent.records

    def _full_mask(self, records: int) -> Any:
        # Uploaded once: most batches are whole.
        if self._all_valid is None:
            import torch

            self._all_valid = self._replication.to_device(torch.ones(records, dtype=torch.bool))
        return self._all_valid

    def finish_epoch(self) -> None:
        """Count the epoch as finished: a run that goes on from here begins the next one.

        The next iteration does so too; until then the position is after the last batch that was given.
        """
        self._position.end()

    @property
    def batches_before(self) -> int:
        """Batches of the coming iteration's epoch that a run before this one was given."""
        return self._position.before

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop stands: the epoch, and the batches of it that the loop was given.

        The same in every replica, and JSON can hold it. Another number of replicas can go on from there,
        where the plugin that divides the records can.
        """
        at = self._position
        state = {"epoch": at.epoch, "batches": at.before + at.given}
        if at.before + at.given and hasattr(self._source, "state_dict"):
            state["source"] = self._source.state_dict(at.given)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where `state_dict` was called.

        A source that cannot begin in the middle is read from its start, and as many batches are left out.
        """
        at = self._position = Position(epoch=state["epoch"], before=state["batches"])
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(at.epoch)
        if "source" in state and hasattr(self._source, "load_state_dict"):
            self._source.load_state_dict(state["source"])
        else:
            at.skip = at.before


@dataclass
class Position:
    """Where a loop stands in its data.

    Attributes:
        epoch: of the iteration that is under way, or comes next.
        before: batches of that epoch that were given before its iteration began: in a run that was resumed.
        given: batches given since.
        skip: batches to leave out when the iteration begins.
    """

    epoch: int = 0
    before: int = 0
    given: int = 0
    skip: int = 0
    _is_begun: bool = False

    def begin(self) -> int:
        """Begin an iteration; return how many batches it leaves out."""
        if self._is_begun:
            # Of the last one, whose source has gone on to the next epoch as well.
            self.end()
        self._is_begun = True
        skip, self.skip = self.skip, 0
        return skip

    def end(self) -> None:
        """Be at the start of the next epoch."""
        self.epoch += 1
        self.before = self.given = 0
        self._is_begun = False


def _batch_size(source: Any) -> int | None:
    size = getattr(source, "batch_size", None)
    return size if isinstance(size, int) else None
