"""Batches of sequences of similar length, in a fixed number of shapes."""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from torch.utils.data import Sampler, default_collate

from polyxla_sampler.epochs import Division, Remainder, ResumableEpochs, State, resolve_rank
from polyxla_sampler.permutation import make_order, wrap_around
from polyxla_sampler.seeded_rng import derive_seed


class BucketBatchSampler(ResumableEpochs, Sampler[list[int]]):
    """Batches of records of similar length; in each step all replicas use the same bucket.

    All batches of a bucket have the same number of records, so with `BucketCollate` there are only as many
    shapes, and programs to compile, as buckets. No replica waits for another one's longer sequences. A
    bucket's last step is filled up with its first records, or dropped.

    Args:
        lengths: each record's length; a tensor or an array works too.
        boundaries: the maximum length of each bucket, ascending.
        batch_size: number of records per batch and replica: one for all buckets, or one for each.
        max_tokens: instead of `batch_size`, the maximum of padded elements per batch: a bucket's batches
            have ``max_tokens // boundary`` records.
        shuffle: use a new random order in every epoch, of the records in each bucket and of the batches.
        seed: determines the orders; must be the same in every replica.
        drop_last: drop a bucket's last records if they do not fill a step of all replicas.
        num_replicas: number of replicas; None asks torch.distributed.
        rank: this replica, ``0 <= rank < num_replicas``; None asks torch.distributed.

    Raises:
        ValueError: the boundaries do not ascend, a record is longer than the last one, the batch sizes do
            not fit the boundaries, or `rank` is out of range.
    """

    def __init__(
        self,
        lengths: Iterable[int],
        boundaries: Sequence[int],
        batch_size: int | Sequence[int] | None = None,
        max_tokens: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.num_replicas, self.rank = resolve_rank(num_replicas, rank)
        self.boundaries = _checked_boundaries(boundaries)
        self.batch_sizes = _bucket_batch_sizes(self.boundaries, batch_size, max_tokens)
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.remainder: Remainder = "drop" if drop_last else "repeat"
        self._records = _bucket_indices(lengths, self.boundaries)
        self._position = self._start_position()

    def identity(self) -> State:
        """Return the sizes of the buckets and everything that determines the order."""
        return {
            "records": [len(records) for records in self._records],
            "batch_sizes": list(self.batch_sizes),
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else None,
        }

    def __len__(self) -> int:
        """Return how many batches the next iteration has for each replica."""
        position = self._current_plan(self.next_state())
        return sum(self._steps(position)) - int(position["steps"])

    def __iter__(self) -> Iterator[list[int]]:
        state = self.started()
        position = self._current_plan(state)
        # A stream per bucket: the plan says which bucket is next, and its stream has the records.
        streams = [
            self._stream(state["epoch"], bucket, gone, steps)
            for bucket, (gone, steps) in enumerate(zip(position["gone"], self._steps(position), strict=True))
        ]
        plan = self._plan(state["epoch"], position)
        batches = (list(islice(streams[bucket], self.batch_sizes[bucket])) for bucket in plan)
        # The steps before are drawn and dropped, which reads indices only, no records.
        return islice(batches, position["steps"], None)

    def state_after(self, state: State, consumed: int) -> State:
        """Return the state after every replica has used `consumed` batches, starting from `state`."""
        position = self._current_plan(state)
        steps = min(position["steps"] + consumed, sum(self._steps(position)))
        return {**state, "position": {**position, "steps": steps}}

    # A position is a plan and the number of its steps that were taken. A plan is the sequence of buckets,
    # one for each step, determined by how many records of each bucket were used before ("gone") and by the
    # number of replicas. Another number of replicas starts a new plan with the records that are left.
    def _start_position(self) -> State:
        return {"gone": [0] * len(self.boundaries), "replicas": self.num_replicas, "steps": 0}

    def _current_plan(self, state: State) -> State:
        """Return the state's position, in a new plan if it is of another number of replicas."""
        position: State = state["position"]
        if position["replicas"] == self.num_replicas:
            return position
        steps = self._steps(position)
        taken = Counter(islice(self._plan(state["epoch"], position), position["steps"]))
        # After the last step the epoch is over, dropped records included.
        over = position["steps"] >= sum(steps)
        gone = [
            len(records) if over else min(before + taken[bucket] * size * position["replicas"], len(records))
            for bucket, (records, before, size) in enumerate(self._buckets(position))
        ]
        return {**self._start_position(), "gone": gone}

    def _steps(self, position: State) -> list[int]:
        """Return each bucket's number of steps in the position's plan."""
        return [
            Division(len(records) - gone, size * position["replicas"], self.remainder).count(0)
            for records, gone, size in self._buckets(position)
        ]

    def _buckets(self, position: State) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Iterate over each bucket's records, the number used before the plan, and the batch size."""
        return zip(self._records, position["gone"], self.batch_sizes, strict=True)

    def _plan(self, epoch: int, position: State) -> Iterator[int]:
        """Iterate over the bucket of each step of the position's plan."""
        ends = list(accumulate(self._steps(position)))
        order = make_order(ends[-1], self.shuffle, derive_seed(self.seed, epoch))
        # Only the bucket matters, not which of its steps it is: _stream gives its records in their order.
        return (bisect_right(ends, step) for step in order)

    def _stream(self, epoch: int, bucket: int, gone: int, steps: int) -> Iterator[int]:
        """Iterate over this replica's records of one bucket: `steps` steps after the first `gone` records."""
        records = self._records[bucket]
        order = make_order(len(records), self.shuffle, derive_seed(self.seed, epoch, bucket))
        positions = range(gone + self.rank, sys.maxsize, self.num_replicas)
        mine = wrap_around(order, positions[: steps * self.batch_sizes[bucket]])
        return (int(records[index]) for index in mine)


class BucketCollate:
    """Pads the records of a batch to their bucket's boundary, then collates them.

    Args:
        boundaries: the same as the sampler's.
        pad_value: value of the padding after a record's end.
        collate: makes a batch of the padded records; `torch.utils.data.default_collate` by default.
        field: index or key of the sequence, if records are tuples, lists or dicts; None if a record is the
            sequence itself.

    Raises:
        ValueError: a record is longer than the last boundary.
    """

    def __init__(
        self,
        boundaries: Sequence[int],
        pad_value: float = 0,
        collate: Callable[[list[Any]], Any] = default_collate,
        field: Any = None,
    ) -> None:
        self.boundaries = _checked_boundaries(boundaries)
        self.pad_value = pad_value
        self.collate = collate
        self.field = field

    def __call__(self, records: list[Any]) -> Any:
        """Return the batch; its sequences have shape [record, boundary, ...]."""
        sequences = [torch.as_tensor(self._sequence(record)) for record in records]
        length = self._padded_length(max(len(sequence) for sequence in sequences))
        padded = [_padded(sequence, length, self.pad_value) for sequence in sequences]
        return self.collate([self._with(record, new) for record, new in zip(records, padded, strict=True)])

    def _padded_length(self, longest: int) -> int:
        if longest > self.boundaries[-1]:
            raise ValueError(_too_long(longest, self.boundaries))
        return self.boundaries[bisect_left(self.boundaries, longest)]

    def _sequence(self, record: Any) -> Any:
        return record if self.field is None else record[self.field]

    def _with(self, record: Any, sequence: torch.Tensor) -> Any:
        if self.field is None:
            return sequence
        if isinstance(record, dict):
            return {**record, self.field: sequence}
        parts = list(record)
        parts[self.field] = sequence
        return tuple(parts)


def _padded(sequence: torch.Tensor, length: int, value: float) -> torch.Tensor:
    padded = sequence.new_full((length, *sequence.shape[1:]), value)
    padded[: len(sequence)] = sequence
    return padded


def _checked_boundaries(boundaries: Sequence[int]) -> tuple[int, ...]:
    if not boundaries or any(low >= high for low, high in pairwise([0, *boundaries])):
        raise ValueError(
            f"boundaries={list(boundaries)} do not ascend from 1. Give the maximum length of each bucket, "
            "such as [64, 128, 256]."
        )
    return tuple(boundaries)


def _bucket_batch_sizes(
    boundaries: tuple[int, ...], batch_size: int | Sequence[int] | None, max_tokens: int | None
) -> tuple[int, ...]:
    if (batch_size is None) == (max_tokens is None):
        raise ValueError(
            "Give either batch_size= (records per batch) or max_tokens= (padded elements per batch)."
        )
    if max_tokens is not None:
        sizes = [max_tokens // boundary for boundary in boundaries]
    elif isinstance(batch_size, int):
        sizes = [batch_size] * len(boundaries)
    else:
        sizes = list(batch_size or ())
    if len(sizes) != len(boundaries) or min(sizes) < 1:
        raise ValueError(
            f"batches of {sizes} records do not fit {len(boundaries)} buckets with {list(boundaries)}. "
            "Give each bucket a size of at least 1, and make max_tokens at least the last boundary."
        )
    return tuple(sizes)


def _bucket_indices(lengths: Iterable[int], boundaries: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the indices, int64, of each bucket's records."""
    known = torch.as_tensor(lengths if isinstance(lengths, torch.Tensor) else list(lengths), device="cpu")
    if len(known) and int(known.max()) > boundaries[-1]:
        raise ValueError(_too_long(int(known.max()), boundaries))
    # As many comparisons as bits in the number of buckets, for millions of records at once.
    buckets = torch.bucketize(known, torch.tensor(boundaries, device="cpu"))
    return [(buckets == bucket).nonzero().squeeze(1) for bucket in range(len(boundaries))]


def _too_long(length: int, boundaries: tuple[int, ...]) -> str:
    return (
        f"a record of length {length} fits no bucket: the last of boundaries={list(boundaries)} is shorter. "
        "Add a boundary, or truncate or remove such records."
    )
