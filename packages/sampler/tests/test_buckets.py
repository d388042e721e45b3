"""Batches of similar length: few shapes, and the same one in all replicas in each step."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from polyxla_sampler.buckets import BucketBatchSampler, BucketCollate

BOUNDARIES = [4, 8, 16]
SIZES = [3, 2, 1]

corpora = st.lists(st.integers(0, 16), max_size=50)
worlds = st.integers(1, 4)


def samplers(lengths: list[int], world: int, state: Any = None, **settings: Any) -> list[BucketBatchSampler]:
    group = [
        BucketBatchSampler(lengths, BOUNDARIES, SIZES, num_replicas=world, rank=rank, **settings)
        for rank in range(world)
    ]
    for sampler in group if state else []:
        sampler.load_state_dict(json.loads(json.dumps(state)))
    return group


def bucket_of(length: int) -> int:
    return sum(length > boundary for boundary in BOUNDARIES)


@given(lengths=corpora, world=worlds, shuffle=st.booleans(), drop_last=st.booleans())
def test_all_replicas_have_the_same_shape_in_every_step(
    lengths: list[int], world: int, shuffle: bool, drop_last: bool
) -> None:
    group = samplers(lengths, world, shuffle=shuffle, drop_last=drop_last)
    sizes = [len(sampler) for sampler in group]
    for step in zip(*group, strict=True):
        (bucket,) = {bucket_of(lengths[record]) for batch in step for record in batch}
        assert {len(batch) for batch in step} == {SIZES[bucket]}
    hands = [list(sampler) for sampler in group]
    assert [len(hand) for hand in hands] == sizes
    read = Counter(chain.from_iterable(chain.from_iterable(hands)))
    for bucket, size in enumerate(SIZES):
        records = [record for record, length in enumerate(lengths) if bucket_of(length) == bucket]
        left = len(records) % (size * world)
        added = -left if drop_last else -len(records) % (size * world)
        assert sum(read[record] for record in records) == len(records) + added
    assert max(read.values(), default=0) <= 1 or not drop_last


@given(
    lengths=corpora,
    runs=st.lists(st.tuples(worlds, st.integers(0, 6)), min_size=1, max_size=3),
    shuffle=st.booleans(),
)
def test_resumed_runs_of_any_sizes_read_every_record(
    lengths: list[int], runs: list[tuple[int, int]], shuffle: bool
) -> None:
    state: Any = None
    read: list[int] = []
    for world, steps in runs:
        group = samplers(lengths, world, state, shuffle=shuffle)
        hands = [list(sampler) for sampler in group]
        consumed = min(steps, len(hands[0]))
        read += chain.from_iterable(chain.from_iterable(hand[:consumed] for hand in hands))
        states = [sampler.state_dict(consumed) for sampler in group]
        assert states == states[:1] * world
        state = states[0]
    read += chain.from_iterable(samplers(lengths, 1, state, shuffle=shuffle)[0])
    counts = Counter(read)
    assert set(counts) == set(range(len(lengths)))
    for bucket, size in enumerate(SIZES):
        repeats = sum(
            counts[record] - 1 for record, length in enumerate(lengths) if bucket_of(length) == bucket
        )
        # A bucket's last step is filled up only in the run that finished the bucket.
        assert repeats < size * max(1, *(world for world, _ in runs))


@given(lengths=corpora, world=worlds, consumed=st.integers(0, 20))
def test_the_same_number_of_replicas_resumes_with_the_same_batches(
    lengths: list[int], world: int, consumed: int
) -> None:
    first = samplers(lengths, world)[0]
    hand = list(first)
    consumed = min(consumed, len(hand))
    half = samplers(lengths, world, first.state_dict(consumed // 2))[0]
    assert list(half) == hand[consumed // 2 :]
    resumed = samplers(lengths, world, half.state_dict(consumed - consumed // 2))[0]
    assert len(resumed) == len(hand) - consumed
    assert list(resumed) == hand[consumed:]
    resumed.set_epoch(1)
    assert len(list(resumed)) == len(hand)


def test_a_finished_epoch_resumes_empty_for_any_number_of_replicas() -> None:
    sampler = samplers([3] * 11, 2, drop_last=True)[0]
    state = sampler.state_dict(len(list(sampler)))
    assert list(samplers([3] * 11, 1, state, drop_last=True)[0]) == []


def test_each_epoch_mixes_the_batches_of_all_buckets_in_a_new_order() -> None:
    lengths = [length % 16 + 1 for length in range(200)]
    sampler = samplers(lengths, 1)[0]
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert first != second
    assert [bucket_of(lengths[batch[0]]) for batch in first] != sorted(
        bucket_of(lengths[batch[0]]) for batch in first
    )
    in_order = samplers(lengths, 1, shuffle=False)[0]
    assert next(iter(in_order)) == [0, 1, 2]


def test_max_tokens_limits_the_padded_elements_of_a_batch() -> None:
    sampler = BucketBatchSampler([1], [10, 25, 100], max_tokens=100, num_replicas=1, rank=0)
    assert sampler.batch_sizes == (10, 4, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"boundaries": [8, 4]}, r"boundaries=\[8, 4\] do not ascend"),
        ({"boundaries": []}, "do not ascend"),
        ({"lengths": [3, 17]}, "a record of length 17 fits no bucket"),
        ({"batch_size": [1, 2]}, r"batches of \[1, 2\] records do not fit 3 buckets"),
        ({"batch_size": None}, "Give either batch_size="),
        ({"max_tokens": 64}, "Give either batch_size="),
        ({"batch_size": None, "max_tokens": 15}, "make max_tokens at least the last boundary"),
    ],
)
def test_invalid_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    settings = {"lengths": [1], "boundaries": BOUNDARIES, "batch_size": 2, "num_replicas": 1, "rank": 0}
    with pytest.raises(ValueError, match=message):
        BucketBatchSampler(**{**settings, **arguments})


def test_a_state_of_other_batch_sizes_is_refused() -> None:
    state = samplers([1, 2, 3], 1)[0].state_dict(0)
    other = BucketBatchSampler(torch.tensor([1, 2, 3]), BOUNDARIES, 5, num_replicas=1, rank=0)
    with pytest.raises(ValueError, match=r"batch_sizes=\[3, 2, 1\], and BucketBatchSampler has"):
        other.load_state_dict(state)


def test_a_loader_has_at_most_as_many_shapes_as_buckets() -> None:
    records = [(torch.arange(index % 16 + 1), index) for index in range(100)]
    batches = BucketBatchSampler(
        (len(sequence) for sequence, _ in records), BOUNDARIES, SIZES, num_replicas=1, rank=0
    )
    collate = BucketCollate(BOUNDARIES, pad_value=-1, field=0)
    loader: DataLoader[Any] = DataLoader(records, batch_sampler=batches, collate_fn=collate)  # type: ignore[arg-type]
    shapes = set()
    for sequences, indices in loader:
        shapes.add(tuple(sequences.shape))
        assert [int((row >= 0).sum()) for row in sequences] == [int(index) % 16 + 1 for index in indices]
    assert shapes == {(3, 4), (2, 8), (1, 16)}


def test_the_collate_function_pads_sequences_of_any_kind() -> None:
    collate = BucketCollate([2, 4], pad_value=9)
    assert collate([[1], [1, 2, 3]]).tolist() == [[1, 9, 9, 9], [1, 2, 3, 9]]
    assert collate([torch.ones(1, 5)]).shape == (1, 2, 5)
    named = BucketCollate([2, 4], field="ids")([{"ids": [7], "label": 1}])
    assert (named["ids"].tolist(), named["label"].tolist()) == ([[7, 0]], [1])
    with pytest.raises(ValueError, match="length 5 fits no bucket"):
        collate([[0] * 5])
