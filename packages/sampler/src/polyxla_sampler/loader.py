"""Dividing a DataLoader's records among replicas. Heavy: imported where a loader is divided."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from polyxla_sampler.iterable import Origin, ShardedIterable, Streams
from polyxla_sampler.resume import InTurn, Resumable, State
from polyxla_sampler.sampler import ShardedSampler
from polyxla_sampler.wrapped_sampler import DealtSampler

# Arguments that a rebuilt loader is given anew; a loader keeps all others under their own names.
_REPLACED = {"self", "dataset", "shuffle", "sampler", "batch_sampler", "batch_size", "drop_last"}


class ShardedLoader:
    """A DataLoader that reads one replica's records, and can say where it stands and go on from there.

    It can be iterated over any number of times; each iteration is the next epoch.

    Args:
        loader: draws from `source`.
        source: says which records, batches or streams are this replica's.
        batch_size: number of records per batch; None where batches differ or nobody can say.
        note: what was done to the person's loader, one sentence for them.

    Attributes:
        loader: the DataLoader that is iterated over.
        batch_size: number of records per batch; None where batches differ or nobody can say.
        note: what was done to the person's loader, one sentence for them.
    """

    def __init__(self, loader: DataLoader[Any], source: Resumable, batch_size: int | None, note: str) -> None:
        self.loader = loader
        self.batch_size = batch_size
        self.note = note
        self._source = source
        self._epoch = 0
        self._began: State | None = None
        self._running: State | None = None

    def __len__(self) -> int:
        """Return the number of batches of the coming iteration; of a stream, by its dataset's length.

        Raises:
            TypeError: what it reads has no length.
        """
        state = self._coming()
        if isinstance(self._source, Streams):
            # Asking the loader would make torch warn where workers' streams end unevenly.
            return self._batches(self._source.count(state))
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._source.set_epoch(self._epoch)
        self._began = self._running = self._source.begin()
        self._epoch += 1
        return self._run(iter(self.loader), self._began)

    def _run(self, batches: Iterator[Any], state: State) -> Iterator[Any]:
        try:
            yield from self._source.batches(batches) if isinstance(self._source, Streams) else batches
        finally:
            if self._running is state:
                self._running = None

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next, from 0."""
        self._epoch = epoch

    def state_dict(self, batches: int) -> State:
        """Return where the replicas stand in the iteration that began last.

        It is of JSON's types and the same in every replica. Records can be gone on with by any number of
        replicas with any batch size, batches of a batch sampler by any number of replicas, and a stream's
        records if there are as many workers.

        Args:
            batches: how many the loop has had of that iteration; what was read ahead does not count.
        """
        state = self._began or self._coming()
        return self._source.advanced(state, self._items(state, batches))

    def load_state_dict(self, state: State) -> None:
        """Let the next iteration go on where `state` was; nothing is left of it where an epoch was over.

        Raises:
            ValueError: `state` is not of this data or order.
        """
        self._source.load_state_dict(state)
        self._epoch, self._began, self._running = state["epoch"], None, None

    @property
    def valid_records(self) -> int | None:
        """How many records of this iteration, or of the coming one between two, are not repeats.

        Repeats come last in each replica. None where nobody can say: of streams and buckets, and where the
        loader's own sampler divides the records.
        """
        state = self._running or self._coming()
        if not isinstance(self._source, InTurn) or isinstance(self._source, OwnDivision):
            return None
        count, valid = self._source.count(state), self._source.valid(state)
        if count is None or valid is None:
            return None
        if isinstance(self._source, DealtSampler) and _has_batches(self.loader):
            return sum(len(batch) for batch in islice(self._source.items(state), valid))
        return min(valid, self._batches(count) * (self.loader.batch_size or 1))

    def _coming(self) -> State:
        self._source.set_epoch(self._epoch)
        return self._source.coming()

    def _batches(self, items: int) -> int:
        """Return how many batches so many of the source's items make."""
        size = self.loader.batch_size or 1
        return items // size if self.loader.drop_last else -(-items // size)

    def _items(self, state: State, batches: int) -> int:
        """Return how many of the source's items were consumed with so many batches."""
        if not isinstance(self._source, InTurn):
            return batches
        count = self._source.count(state)
        if count is not None and batches >= self._batches(count):
            # The loop is over, and with it the records of an incomplete batch that the loader drops.
            return count
        return batches * (self.loader.batch_size or 1)


class OwnDivision(DealtSampler):
    """A sampler that divides records among replicas by itself; nothing is added but states.

    Args:
        sampler: gives this replica's indices, or lists of them.
        shards: among how many replicas it divides them.
    """

    def __init__(self, sampler: Any, shards: int) -> None:
        super().__init__(sampler, num_replicas=1, rank=0, seed=None)
        self.shards = shards

    def identity(self) -> State:
        """Return the number of replicas as well: another one's places in the order cannot be told."""
        return {"num_replicas": self.shards, **super().identity()}


def shard(
    loader: Any, shard_index: int, shard_count: int, seed: int = 0, repeat: bool = True
) -> ShardedLoader | None:
    """Return a loader of this replica's records, in an order that depends on `seed` and the epoch only.

    A shuffling loader's records come in a new order each epoch, and all others in theirs; samplers and
    batch samplers of any kind are divided by what they draw, iterable datasets by what they give, and a
    loader whose sampler divides the records already (it has `num_replicas` and `rank`) stays as it is.
    The loader's other arguments are kept.

    Every replica gets as many batches. Where records do not go round, the first are repeated, or with the
    loader's ``drop_last`` the last left out.

    Args:
        loader: what may be a DataLoader.
        shard_index: this replica, ``0 <= shard_index < shard_count``.
        shard_count: number of replicas.
        seed: the same in every replica.
        repeat: False where no record may be left out to make counts equal: what does not go round is
            repeated then also with ``drop_last``, which concerns the last batch of each replica only, and
            `ShardedLoader.valid_records` tells repeats from the rest.

    Returns:
        None where it is no DataLoader.
    """
    if not isinstance(loader, DataLoader):
        return None
    drop_last = repeat and bool(getattr(loader.batch_sampler, "drop_last", False))
    if isinstance(loader.dataset, IterableDataset):
        return _of_stream(loader, shard_index, shard_count, seed, drop_last)
    if (divider := _divider(loader)) is not None:
        return _of_divided(loader, divider, shard_count)
    drawn = loader.batch_sampler if _has_batches(loader) else loader.sampler
    source = _dealer(drawn, shard_index, shard_count, seed, drop_last)
    what = "the records" if isinstance(source, ShardedSampler) else f"what {type(drawn).__name__} draws"
    order = ", in a new order every epoch" if getattr(source, "shuffle", False) else ""
    note = _note(loader, f"{_turn(shard_count)} {what}{order}")
    return ShardedLoader(_rebuilt(loader, source), source, _batch_size(loader), note)


def _dealer(drawn: Any, index: int, count: int, seed: int, drop_last: bool) -> ShardedSampler | DealtSampler:
    plain = type(drawn) is RandomSampler and not drawn.replacement and len(drawn) == len(drawn.data_source)
    if plain or type(drawn) is SequentialSampler:
        return ShardedSampler(len(drawn), count, index, plain, seed, drop_last)
    return DealtSampler(drawn, count, index, seed, drop_last)


def _of_stream(loader: DataLoader[Any], index: int, count: int, seed: int, drop_last: bool) -> ShardedLoader:
    dataset: Any = loader.dataset
    name = type(dataset).__name__
    note = f"{_turn(count)} the records of {name}, which every replica reads"
    if hasattr(dataset, "num_replicas") and hasattr(dataset, "rank"):
        note = f"{name} divides its records itself, among {dataset.num_replicas} replica(s)"
        index, count = 0, 1
    mine = ShardedIterable(dataset, count, index, seed, drop_last, loader.num_workers)
    rebuilt = _rebuilt(loader, None, dataset=mine, collate_fn=Origin(loader.collate_fn))
    source = Streams(mine, loader.batch_size or 1)
    return ShardedLoader(rebuilt, source, loader.batch_size, _note(loader, note))


def _of_divided(loader: DataLoader[Any], divider: Any, count: int) -> ShardedLoader:
    note = f"{type(divider).__name__} divides the records itself, among {divider.num_replicas} replica(s)"
    if divider.num_replicas != count:
        note = f"{note}, although there are {count}"
    drawn: Any = loader.batch_sampler if _has_batches(loader) else loader.sampler
    if isinstance(drawn, Resumable):
        return ShardedLoader(loader, drawn, _batch_size(loader), note)
    source = OwnDivision(drawn, divider.num_replicas)
    return ShardedLoader(_rebuilt(loader, source), source, _batch_size(loader), _note(loader, note))


def _divider(loader: DataLoader[Any]) -> Any | None:
    """Return the sampler that divides the records among replicas already, if there is one."""
    batches = loader.batch_sampler
    for sampler in (batches, getattr(batches, "sampler", None), loader.sampler):
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            return sampler
    return None


def _has_batches(loader: DataLoader[Any]) -> bool:
    """Return whether a batch sampler of the person's says the batches."""
    return loader.batch_size is None and loader.batch_sampler is not None


def _batch_size(loader: DataLoader[Any]) -> int | None:
    size = getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def _rebuilt(loader: DataLoader[Any], sampler: Any, **changed: Any) -> DataLoader[Any]:
    """Return `loader` with another sampler, or batch sampler where it has one of the person's."""
    names = inspect.signature(DataLoader.__init__).parameters.keys() - _REPLACED
    arguments = {"dataset": loader.dataset, **{name: getattr(loader, name) for name in names}, **changed}
    if _has_batches(loader):
        return _kind(loader)(batch_sampler=sampler, **arguments)
    return _kind(loader)(
        sampler=sampler, batch_size=loader.batch_size, drop_last=loader.drop_last, **arguments
    )


def _kind(loader: DataLoader[Any]) -> type[DataLoader[Any]]:
    """Return the loader's class where it is called with DataLoader's arguments."""
    return type(loader) if type(loader).__init__ is DataLoader.__init__ else DataLoader


def _note(loader: DataLoader[Any], note: str) -> str:
    if _kind(loader) is type(loader):
        return note
    return f"{note}; a plain DataLoader loads them, because {type(loader).__name__} has arguments of its own"


def _turn(count: int) -> str:
    return f"each of {count} replicas takes its turn at" if count > 1 else "the one replica takes all of"
