"""Dividing a DataLoader's records among replicas. Heavy: imported where there are several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler


class ShardedLoader:
    """A DataLoader that reads one replica's records, in another order each time it is iterated over.

    Args:
        loader: its sampler is a `DistributedSampler`.
    """

    def __init__(self, loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> None:
        self.loader = loader
        self.sampler = sampler
        self._epoch = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.sampler.set_epoch(self._epoch)
        self._epoch += 1
        return iter(self.loader)


def shard(loader: Any, shard_index: int, shard_count: int) -> Any | None:
    """Return a loader of every record whose place in the epoch's order is this replica's.

    Every replica gets the same number of records: the first are repeated where they do not divide
    evenly, or the last left out where the loader drops its last batch. A loader that divides its records
    already is returned as it is.

    Returns:
        None where this package does not know how: it is no DataLoader, or it has a sampler, batch
        sampler or iterable dataset of its own.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if isinstance(loader.sampler, DistributedSampler):
        return loader
    if loader.batch_size is None or type(loader.sampler) not in (RandomSampler, SequentialSampler):
        return None
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset,
        num_replicas=shard_count,
        rank=shard_index,
        shuffle=isinstance(loader.sampler, RandomSampler),
        drop_last=loader.drop_last,
    )
    return ShardedLoader(_rebuilt(loader, sampler), sampler)


def _rebuilt(loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> DataLoader[Any]:
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
