"""Divide a DataLoader's records among replicas, unless its sampler or dataset divides them already.

Imports torch: imported when a loader is divided.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from polyxla_sampler.epochs import ResumableEpochs, RoundRobinEpochs, State
from polyxla_sampler.iterable import EvaluationIterable, ShardedIterable, StreamEpochs, WorkerIdCollate
from polyxla_sampler.sampler import EvaluationSampler, RoundRobinSampler, ShardedSampler

_WORLDS = ("_distributed", "_parallel_rank_world", "_rank_world", "distributed_env")
"""Attributes that hold an object with the numbers below.
Source: ``split_dataset_by_node`` of datasets 5.2, ``StreamingDataset`` of mosaicml-streaming 0.13 and 0.7,
and that of litdata 0.2.
"""
_NUMBERS = (
    ("num_replicas", "rank"),
    ("world_size", "rank"),
    ("_world_size", "_rank"),
    ("num_processes", "process_index"),
    ("num_ranks", "rank"),
    ("world_size", "global_rank"),
)
"""Attributes with the number of parts and the number of this one.
Source: torch's DistributedSampler, samplers of mmengine and of detectron2, Accelerate, and those above.
"""
_DEPTH = 4
"""Number of datasets that may wrap the one that divides the records."""


@dataclass(frozen=True)
class Divided:
    """Something that divides records.

    Attributes:
        name: what does it.
        parts: among how many replicas.
    """

    name: str
    parts: int

    def note(self, replicas: int) -> str:
        """Return the sentence to print in a job of this number of replicas."""
        note = f"{self.name} divides the records among {self.parts} replica(s) itself"
        return note if self.parts == replicas else f"{note}, although there are {replicas}"


def divided_by(source: Any, replicas: int) -> Divided | None:
    """Return what divides the records of a sampler or a dataset, itself or one inside it; or None.

    What was made for one replica divides nothing, where there are several.
    """
    for part in _within(source, _DEPTH):
        parts = _webdataset_parts() if _splits_by_node(part) else _parts(part)
        if parts is not None and (parts > 1 or replicas == 1):
            return Divided(getattr(part, "__name__", type(part).__name__), parts)
    return None


def _parts(source: Any) -> int | None:
    """Return among how many replicas an object with its attributes divides."""
    for holder in (source, *(getattr(source, name, None) for name in _WORLDS)):
        for count, rank in _NUMBERS:
            found = getattr(holder, count, None), getattr(holder, rank, None)
            if all(type(number) is int for number in found):
                return found[0]
    return None


def _splits_by_node(source: Any) -> bool:
    module = getattr(source, "__module__", None) or ""
    return getattr(source, "__name__", "") == "split_by_node" and module.partition(".")[0] == "webdataset"


def _webdataset_parts() -> int:
    """Return among how many replicas WebDataset divides: by the environment, or by torch.distributed."""
    # WebDataset is loaded, because one of its functions was found.
    parts: int = sys.modules["webdataset.utils"].pytorch_worker_info()[1]
    return parts


def _within(source: Any, depth: int) -> Iterator[Any]:
    """Yield an object, and the datasets and the stages of a pipeline that it holds."""
    yield source
    if depth == 0:
        return
    # Pipelines and wrappers keep their source under many names, so all attributes are searched.
    for value in vars(source).values() if hasattr(source, "__dict__") else ():
        for part in value if isinstance(value, list | tuple) else [value]:
            if isinstance(part, IterableDataset):
                yield from _within(part, depth - 1)
            elif _splits_by_node(part):
                yield part


# A rebuilt loader gets new values for these arguments. A DataLoader has all others as attributes of the same
# name, so subclasses and new releases of torch need no list here.
_REPLACED = {"self", "dataset", "shuffle", "sampler", "batch_sampler", "batch_size", "drop_last"}


class ShardedLoader:
    """A DataLoader that reads one replica's records, saves its position and resumes from it.

    It can be iterated over any number of times; each iteration is the next epoch.

    Args:
        loader: draws from the sampler or the iterable dataset whose position `epochs` counts.
        epochs: that sampler, or the positions in that dataset's streams.
        batch_size: number of records per batch; None if batches differ or the number is unknown.
        note: how the user's loader was changed, in one sentence to print.
        evaluation: the sampler of `loader` in an evaluation; None in training.

    Attributes:
        loader: the DataLoader that is iterated over.
        batch_size: number of records per batch; None if batches differ or the number is unknown.
        note: how the user's loader was changed, in one sentence to print.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        epochs: ResumableEpochs,
        batch_size: int | None,
        note: str,
        evaluation: EvaluationSampler | None = None,
    ) -> None:
        self.loader = loader
        self.batch_size = batch_size
        self.note = note
        self._epochs = epochs
        self._evaluation = evaluation
        self._epoch = 0
        self._began: State | None = None

    def __len__(self) -> int:
        """Return the number of batches of the next iteration; for a stream, by the dataset's length.

        Raises:
            TypeError: the sampler or the dataset has no length.
        """
        state = self._next_state()
        if isinstance(self._epochs, StreamEpochs):
            # Not len() of the loader: with it torch warns if the streams of the workers end unevenly.
            return self._epochs.count(state)
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, is_repeat in self.marked() if not is_repeat)

    def marked(self) -> Iterator[tuple[Any, bool]]:
        """Iterate over one epoch's batches, and tell of each whether it only repeats records.

        Only with ``repeat=False`` a batch is marked, and is there because other replicas have another batch.
        """
        self._epochs.set_epoch(self._epoch)
        state = self._began = self._epochs.begin()
        self._epoch += 1
        batches: Iterator[Any] = iter(self.loader)
        if isinstance(self._epochs, StreamEpochs):
            return self._epochs.marked(batches)
        found = self._evaluated(state)
        return ((batch, found is not None and number >= found[1]) for number, batch in enumerate(batches))

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, from 0."""
        self._epoch = epoch

    def state_dict(self, batches: int) -> State:
        """Return the position of the replicas in the latest iteration.

        It has JSON types only and is the same in every replica. Records can be resumed by any number of
        replicas with any batch size, batches of a batch sampler by any number of replicas, and a stream's
        records with the same number of workers.

        Args:
            batches: number of batches of that iteration that the loop has used; prefetched ones do not
                count.
        """
        state = self._began or self._next_state()
        return self._epochs.state_after(state, self._items(state, batches))

    def load_state_dict(self, state: State) -> None:
        """Resume the next iteration from `state`; it is empty if the epoch was over.

        Raises:
            ValueError: `state` belongs to other data or another order.
        """
        self._epochs.load_state_dict(state)
        self._epoch, self._began = state["epoch"], None

    def _next_state(self) -> State:
        self._epochs.set_epoch(self._epoch)
        return self._epochs.next_state()

    def _evaluated(self, state: State) -> tuple[int, int] | None:
        """Return the number of an evaluation's batches after `state`, and of those without repeats."""
        return None if self._evaluation is None else self._evaluation.batches(state)

    def _batches(self, items: int) -> int:
        """Return the number of batches that `items` of the sampler make."""
        size = self.loader.batch_size or 1
        return items // size if self.loader.drop_last else -(-items // size)

    def _items(self, state: State, batches: int) -> int:
        """Return how many items of the sampler were used for `batches`."""
        if not isinstance(self._epochs, RoundRobinEpochs):
            return batches
        count, found = self._epochs.count(state), self._evaluated(state)
        if count is not None and batches >= (found[0] if found else self._batches(count)):
            # The loop is over, so the records of an incomplete batch that the loader dropped are used up too.
            return count
        return batches * (self.loader.batch_size or 1)


class SelfShardedSampler(RoundRobinSampler):
    """Adds states to a sampler that divides the records among replicas itself.

    Args:
        sampler: yields this replica's indices, or lists of them.
        shards: the number of replicas that it divides them among.
    """

    def __init__(self, sampler: Any, shards: int) -> None:
        super().__init__(sampler, num_replicas=1, rank=0, seed=None)
        self.shards = shards

    def identity(self) -> State:
        """Return the number of replicas too: positions for another number are unknown."""
        return {"num_replicas": self.shards, **super().identity()}


def shard(
    loader: Any, shard_index: int, shard_count: int, seed: int = 0, repeat: bool = True
) -> ShardedLoader | None:
    """Return a loader of this replica's records, in an order that depends only on `seed` and the epoch.

    With ``shuffle=True`` the records have a new order in each epoch, otherwise the dataset's. The items of
    any other sampler or batch sampler, and the records of an iterable dataset, are divided round-robin. A
    loader whose sampler or dataset divides the records already is not divided again
    (`polyxla_sampler.loader`). The loader's other arguments are kept.

    Every replica gets the same number of batches. If the records do not divide evenly, the first ones are
    repeated, or with the loader's ``drop_last`` the last ones dropped.

    Args:
        loader: usually a DataLoader.
        shard_index: this replica, ``0 <= shard_index < shard_count``.
        shard_count: number of replicas.
        seed: must be the same in every replica.
        repeat: False for an evaluation: no record counts twice, and none is dropped to make the counts
            equal. A batch may have fewer records than in other replicas, and a batch that only repeats some
            comes from `ShardedLoader.marked`. ``drop_last`` drops the last batch of all replicas if it is
            incomplete in the first.

    Returns:
        None if `loader` is not a DataLoader.
    """
    if not isinstance(loader, DataLoader):
        return None
    # An evaluation must see every record, whatever the loader says.
    drop_last = repeat and bool(getattr(loader.batch_sampler, "drop_last", False))
    if isinstance(loader.dataset, IterableDataset):
        return _stream_loader(loader, shard_index, shard_count, seed, repeat)
    if (divided := _division(loader, shard_count)) is not None:
        return _self_sharded_loader(loader, divided, shard_count, repeat)
    drawn: Any = loader.batch_sampler if _has_batches(loader) else loader.sampler
    sampler = _divided_sampler(drawn, shard_index, shard_count, seed, drop_last)
    is_plain = isinstance(sampler, ShardedSampler)
    what = f"the {len(drawn):,} records" if is_plain else f"the items of {type(drawn).__name__}"
    order = ", in a new order every epoch" if getattr(sampler, "shuffle", False) else ""
    note = _note(loader, f"{_who_reads(shard_count)} {what}{order}")
    return _sampled_loader(loader, sampler, note, repeat)


def _sampled_loader(
    loader: DataLoader[Any], sampler: ShardedSampler | RoundRobinSampler, note: str, repeat: bool
) -> ShardedLoader:
    if repeat:
        return ShardedLoader(_rebuilt(loader, sampler), sampler, _batch_size(loader), note)
    evaluation = EvaluationSampler(sampler, loader.batch_size or 1, loader.drop_last)
    # The last batch is the one that may be a repeat.
    rebuilt = _rebuilt(loader, evaluation, drop_last=False, in_order=True)
    return ShardedLoader(rebuilt, sampler, _batch_size(loader), note, evaluation)


def _divided_sampler(
    drawn: Any, index: int, count: int, seed: int, drop_last: bool
) -> ShardedSampler | RoundRobinSampler:
    plain = type(drawn) is RandomSampler and not drawn.replacement and len(drawn) == len(drawn.data_source)
    if plain or type(drawn) is SequentialSampler:
        return ShardedSampler(len(drawn), count, index, plain, seed, drop_last)
    return RoundRobinSampler(drawn, count, index, seed, drop_last)


def _stream_loader(loader: DataLoader[Any], index: int, count: int, seed: int, repeat: bool) -> ShardedLoader:
    dataset: Any = loader.dataset
    name = type(dataset).__name__
    note = f"{_who_reads(count)} the records of {name}; every replica reads all of them"
    if (divided := divided_by(dataset, count)) is not None:
        note = divided.note(count)
        index, count = 0, 1
    size, drop_last, workers = loader.batch_size or 1, loader.drop_last, loader.num_workers
    collate = WorkerIdCollate(loader.collate_fn)
    if repeat:
        mine = ShardedIterable(dataset, count, index, seed, drop_last, workers)
        rebuilt = _rebuilt(loader, None, dataset=mine, collate_fn=collate)
    else:
        mine = EvaluationIterable(dataset, count, index, seed, workers, size, drop_last)
        rebuilt = _rebuilt(loader, None, dataset=mine, collate_fn=collate, drop_last=False)
    epochs = StreamEpochs(mine, size, drop_last)
    return ShardedLoader(rebuilt, epochs, loader.batch_size, _note(loader, note))


def _self_sharded_loader(
    loader: DataLoader[Any], divided: Divided, count: int, repeat: bool
) -> ShardedLoader:
    note = divided.note(count)
    drawn: Any = loader.batch_sampler if _has_batches(loader) else loader.sampler
    # One of this package's samplers, which the user has divided already, has states of its own.
    if isinstance(drawn, ShardedSampler | RoundRobinSampler) and not repeat:
        return _sampled_loader(loader, drawn, _note(loader, note), repeat)
    if isinstance(drawn, ResumableEpochs):
        return ShardedLoader(loader, drawn, _batch_size(loader), note)
    sampler = SelfShardedSampler(drawn, divided.parts)
    return ShardedLoader(_rebuilt(loader, sampler), sampler, _batch_size(loader), _note(loader, note))


def _division(loader: DataLoader[Any], count: int) -> Divided | None:
    """Return what divides the records among replicas already, of the loader's samplers."""
    batches = loader.batch_sampler
    samplers = (batches, getattr(batches, "sampler", None), loader.sampler)
    return next(filter(None, (divided_by(sampler, count) for sampler in samplers)), None)


def _has_batches(loader: DataLoader[Any]) -> bool:
    """Return whether the batches come from the user's batch sampler."""
    return loader.batch_size is None and loader.batch_sampler is not None


def _batch_size(loader: DataLoader[Any]) -> int | None:
    size = getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def _rebuilt(loader: DataLoader[Any], sampler: Any, **changed: Any) -> DataLoader[Any]:
    """Return `loader` with another sampler; with another batch sampler if the user passed one."""
    names = inspect.signature(DataLoader.__init__).parameters.keys() - _REPLACED
    arguments = {"dataset": loader.dataset, **{name: getattr(loader, name) for name in names}, **changed}
    if _has_batches(loader):
        return _loader_class(loader)(batch_sampler=sampler, **arguments)
    batching = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    return _loader_class(loader)(sampler=sampler, **{**batching, **arguments})


def _loader_class(loader: DataLoader[Any]) -> type[DataLoader[Any]]:
    """Return the loader's class if it takes DataLoader's arguments, otherwise DataLoader."""
    return type(loader) if type(loader).__init__ is DataLoader.__init__ else DataLoader


def _note(loader: DataLoader[Any], note: str) -> str:
    if _loader_class(loader) is type(loader):
        return note
    return f"{note}; a plain DataLoader loads them, because {type(loader).__name__} takes other arguments"


def _who_reads(count: int) -> str:
    return f"each of {count} replicas gets an equal share of" if count > 1 else "the only replica gets all of"
