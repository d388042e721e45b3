"""Divide an iterable dataset among replicas, in each of a DataLoader's workers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from polyxla_sampler.epochs import Division, Remainder, ResumableEpochs, State, resolve_rank, round_robin
from polyxla_sampler.seeded_rng import derive_seed, iterate_seeded, seed_generators


class ShardedIterable(IterableDataset[Any]):
    """One replica's records of an iterable dataset, divided round-robin.

    Every replica reads the whole stream of records and keeps its own. Each worker of a DataLoader reads a
    stream of its own, and each stream is divided separately: a dataset that splits itself by
    `torch.utils.data.get_worker_info` needs no change, and all replicas get the same number of
    records from each worker.

    The process's random generators are seeded equally in all replicas while the dataset draws. Without
    workers they are exchanged for each of this replica's records, which takes about 0.1 ms. The dataset's
    `set_epoch` is called before each epoch, if it has one.

    All other attributes are read from and written to the dataset, so a `worker_init_fn` can use
    ``get_worker_info().dataset`` as before.

    Args:
        dataset: must give the same records in the same order to all replicas.
        num_replicas: number of replicas; None asks torch.distributed.
        rank: this replica, ``0 <= rank < num_replicas``; None asks torch.distributed.
        seed: must be the same in every replica.
        drop_last: drop a stream's last records if they do not divide evenly, instead of repeating its
            first ones.
        workers: number of the DataLoader's workers.

    Raises:
        ValueError: `rank` is out of range, or one of the two is missing and torch.distributed is not
            initialized.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        workers: int = 0,
    ) -> None:
        num_replicas, rank = resolve_rank(num_replicas, rank)
        remainder: Remainder = "drop" if drop_last else "repeat"
        # In shared memory: persistent workers read the start of the next epoch from it.
        start = torch.zeros(1 + max(workers, 1), dtype=torch.int64, device="cpu").share_memory_()
        # Written to __dict__, because __setattr__ writes to the wrapped dataset.
        own = {"dataset": dataset, "num_replicas": num_replicas, "rank": rank, "seed": seed}
        self.__dict__.update(own, remainder=remainder, _start=start)

    @property
    def stream_count(self) -> int:
        """Number of streams: one for each worker, or a single one without workers."""
        return len(self._start) - 1

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, in all workers."""
        self.start(epoch, [0] * self.stream_count)

    def start(self, epoch: int, skipped: list[int]) -> None:
        """Set the next epoch, and how many records to skip at the start of each worker's stream."""
        self._start.copy_(torch.tensor([epoch, *skipped]))

    def __len__(self) -> int:
        """Return how many records a whole epoch has, if a single stream is read.

        Raises:
            TypeError: the dataset has no length.
        """
        return self.division().count(self.rank)

    def division(self, skipped: int = 0) -> Division:
        """Return how the records after the first `skipped` are divided."""
        # Never negative: a dataset may tell a length that is too small.
        return Division(max(len(self.dataset) - skipped, 0), self.num_replicas, self.remainder)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        stream = info.id if info else 0
        # Without this check, records would be read twice or never, without any error.
        if stream >= self.stream_count:
            raise ValueError(
                f"worker {stream} has no stream: ShardedIterable was made with workers={self.stream_count}. "
                "Pass the DataLoader's num_workers as workers=."
            )
        epoch, skipped = int(self._start[0]), int(self._start[1 + stream])
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        records = self._records(derive_seed(self.seed, epoch, stream), in_worker=info is not None)
        return self._share(records, skipped)

    def _share(self, records: Iterable[Any], skipped: int) -> Iterator[Any]:
        """Iterate over this replica's records of a stream, after the first `skipped` of all replicas."""
        return round_robin(records, skipped, self.num_replicas, self.rank, self.remainder)

    def _records(self, seed: int, in_worker: bool) -> Iterable[Any]:
        dataset: Iterable[Any] = self.dataset
        if not in_worker:
            return iterate_seeded(lambda: dataset, seed, self.num_replicas)
        # In a worker nothing else draws, so there is nothing to restore.
        seed_generators(seed)
        return dataset

    def __getattr__(self, name: str) -> Any:
        # While the object is unpickled it has no dataset yet.
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)


@dataclass(frozen=True)
class Repeat:
    """A record that is repeated, so that a replica has as many batches as the others."""

    record: Any


class EvaluationIterable(ShardedIterable):
    """One replica's records in an evaluation: none counts twice, and all replicas get equally many batches.

    A replica with one record less than the first has a smaller last batch. If that leaves the batch empty, a
    `Repeat` is the whole batch.

    Args:
        dataset: as for `ShardedIterable`.
        num_replicas: number of replicas.
        rank: this replica.
        seed: must be the same in every replica.
        workers: number of the DataLoader's workers.
        batch_size: number of records per batch.
        drop_last: drop a stream's last batch if the first replica has too few records for it.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        num_replicas: int,
        rank: int,
        seed: int,
        workers: int,
        batch_size: int,
        drop_last: bool,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, seed, workers=workers)
        self.__dict__.update(_batch_size=batch_size, _drop_last=drop_last)

    def _share(self, records: Iterable[Any], skipped: int) -> Iterator[Any]:
        stream = iter(records)
        first = list(islice(stream, self.num_replicas))
        rest = islice(chain(first, stream), skipped, None)
        batch: list[Any] = []
        for number in count():
            group = list(islice(rest, self.num_replicas))
            if not group:
                return
            if self.rank < len(group):
                batch.append(group[self.rank])
            elif number % self._batch_size == 0:
                batch.append(Repeat(first[(self.rank - len(group)) % len(first)]))
            if not self._drop_last or (number + 1) % self._batch_size == 0:
                yield from batch
                batch.clear()


class WorkerIdCollate:
    """A collate function that adds to each batch the worker's number, and whether it is a `Repeat`.

    Args:
        collate: the loader's own collate function.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, records: Any) -> tuple[int, bool, Any]:
        """Return the worker's number, whether the batch is a repeat, and the batch."""
        info = get_worker_info()
        # The DataLoader passes a list of records, or without batches a single one.
        is_repeat = isinstance(records, Repeat)
        if is_repeat:
            records = records.record
        elif isinstance(records, list) and records and isinstance(records[0], Repeat):
            is_repeat, records = True, [records[0].record]
        return info.id if info else 0, is_repeat, self.collate(records)


class StreamEpochs(ResumableEpochs):
    """The position of the replicas in each worker's stream, counted in batches.

    Args:
        dataset: the streams; each iteration sets where they start.
        batch_size: number of records per batch.
        drop_last: whether a stream's last batch is dropped if it is incomplete.
    """

    def __init__(self, dataset: ShardedIterable, batch_size: int, drop_last: bool) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._workers = array("L")
        self._position = self._start_position()

    def identity(self) -> State:
        """Return the number of streams: with another number the records are divided in another way."""
        return {"streams": len(self._start_position())}

    def begin(self) -> State:
        """Begin an iteration and set where the workers start."""
        state = super().begin()
        self.dataset.start(state["epoch"], state["position"])
        self._workers = array("L")
        return state

    def count(self, state: State) -> int:
        """Return how many batches this replica gets after `state`, by the dataset's length.

        Raises:
            TypeError: the dataset has no length.
        """
        records = self.dataset.division(sum(state["position"])).count(self.dataset.rank)
        return records // self.batch_size if self.drop_last else -(-records // self.batch_size)

    def marked(self, collated: Iterable[tuple[int, bool, Any]]) -> Iterator[tuple[Any, bool]]:
        """Iterate over the batches of a `WorkerIdCollate`, and record which worker each came from."""
        workers = self._workers
        for worker, is_repeat, batch in collated:
            # Workers that are slow or have shorter streams deliver out of turn, so their order is recorded
            # and not computed.
            workers.append(worker)
            yield batch, is_repeat

    def state_after(self, state: State, consumed: int) -> State:
        """Return the state after every replica has used `consumed` batches, starting from `state`."""
        workers = self._workers[:consumed]
        batch = self.batch_size * self.dataset.num_replicas
        position = [gone + workers.count(worker) * batch for worker, gone in enumerate(state["position"])]
        return {**state, "position": position}

    def _start_position(self) -> list[int]:
        return [0] * self.dataset.stream_count
