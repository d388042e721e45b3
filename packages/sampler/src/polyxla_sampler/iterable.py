"""Dividing a dataset that can only be iterated over, in each of a DataLoader's workers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from polyxla_sampler.permutation import derive_seed
from polyxla_sampler.resume import Resumable, State
from polyxla_sampler.round_robin import Division, Last, deal, own_place
from polyxla_sampler.seeded_rng import seed_generators, seeded


class ShardedIterable(IterableDataset[Any]):
    """One replica's records of a stream: each of `num_replicas` records goes to the next replica.

    Every replica reads the whole stream and keeps its part. With a DataLoader's workers each worker's stream
    is divided for itself, so a dataset that splits itself by `torch.utils.data.get_worker_info` stays as it
    is, and all replicas get as many records from each worker. The process's random generators are seeded
    alike in all replicas while the dataset draws, which without workers means exchanging them for each of
    this replica's records, some 0.1 ms; it is told the epoch where it has `set_epoch`.

    Attributes that are not this class's are the dataset's, to read and to set: a `worker_init_fn` finds
    ``get_worker_info().dataset`` as it knows it.

    Args:
        dataset: gives the same records in the same order to all replicas.
        num_replicas: number of replicas; None asks torch.distributed.
        rank: this replica, ``0 <= rank < num_replicas``; None asks torch.distributed.
        seed: the same in every replica.
        drop_last: leave a stream's last records out where they do not go round, instead of repeating the
            stream's first.
        workers: number of the DataLoader's workers.

    Raises:
        ValueError: there is no such rank, or it is not given and torch.distributed is not initialised.
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
        num_replicas, rank = own_place(num_replicas, rank)
        last: Last = "drop" if drop_last else "repeat"
        # Shared memory: workers that persist read here where the next epoch begins.
        start = torch.zeros(1 + max(workers, 1), dtype=torch.int64, device="cpu").share_memory_()
        own = {"dataset": dataset, "num_replicas": num_replicas, "rank": rank, "seed": seed}
        self.__dict__.update(own, last=last, _start=start)

    @property
    def stream_count(self) -> int:
        """Number of streams: one for each worker, or a single one."""
        return len(self._start) - 1

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the coming iteration is, in all workers."""
        self.start(epoch, [0] * self.stream_count)

    def start(self, epoch: int, skipped: list[int]) -> None:
        """Say which epoch comes, and how many records of each worker's stream are left out at its start."""
        self._start.copy_(torch.tensor([epoch, *skipped]))

    def __len__(self) -> int:
        """Return how many records a whole epoch has where a single stream is read.

        Raises:
            TypeError: the dataset has no length.
        """
        return self.division().count(self.rank)

    def division(self, skipped: int = 0) -> Division:
        """Return how all records but the first `skipped` are divided."""
        return Division(max(len(self.dataset) - skipped, 0), self.num_replicas, self.last)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        stream = info.id if info else 0
        if stream >= self.stream_count:
            raise ValueError(
                f"worker {stream} has no stream: ShardedIterable was made with workers={self.stream_count}. "
                "Give it the number of the DataLoader's workers."
            )
        epoch, skipped = int(self._start[0]), int(self._start[1 + stream])
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        records = self._records(derive_seed(self.seed, epoch, stream), in_worker=info is not None)
        return deal(records, skipped, self.num_replicas, self.rank, self.last)

    def _records(self, seed: int, in_worker: bool) -> Iterable[Any]:
        dataset: Iterable[Any] = self.dataset
        if not in_worker:
            return seeded(lambda: dataset, seed, self.num_replicas)
        # Nobody else draws in a worker.
        seed_generators(seed)
        return dataset

    def __getattr__(self, name: str) -> Any:
        # While it is unpickled there is no dataset yet.
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)


class Origin:
    """Collates records, and says which worker did.

    Args:
        collate: makes the batch.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, records: Any) -> tuple[int, Any]:
        """Return the worker's number and the batch."""
        info = get_worker_info()
        return info.id if info else 0, self.collate(records)


class Streams(Resumable):
    """Where the replicas stand in each worker's stream; counted in batches.

    Args:
        dataset: is told where to begin.
        batch_size: number of records per batch.
    """

    def __init__(self, dataset: ShardedIterable, batch_size: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self._workers = array("L")
        self._position = self._beginning()

    def identity(self) -> State:
        """Return the number of streams: another number divides the records in another way."""
        return {"streams": len(self._beginning())}

    def begin(self) -> State:
        """Begin an iteration: the workers are told where."""
        state = super().begin()
        self.dataset.start(state["epoch"], state["position"])
        self._workers = array("L")
        return state

    def count(self, state: State) -> int:
        """Return how many records this replica has from `state` on, by the dataset's length.

        Raises:
            TypeError: the dataset has no length.
        """
        return self.dataset.division(sum(state["position"])).count(self.dataset.rank)

    def batches(self, marked: Iterable[tuple[int, Any]]) -> Iterator[Any]:
        """Iterate over batches that `Origin` marked, and remember which worker each came from."""
        workers = self._workers
        for worker, batch in marked:
            workers.append(worker)
            yield batch

    def advanced(self, state: State, consumed: int) -> State:
        """Return the state after every replica consumed that many batches from `state` on."""
        workers = self._workers[:consumed]
        batch = self.batch_size * self.dataset.num_replicas
        position = [gone + workers.count(worker) * batch for worker, gone in enumerate(state["position"])]
        return {**state, "position": position}

    def _beginning(self) -> list[int]:
        return [0] * self.dataset.stream_count
