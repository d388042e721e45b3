"""A replica's records of every epoch, whole and resumed."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from polyxla_sampler.sampler import ShardedSampler, UnrepeatedSampler

lengths, worlds, flags = st.integers(0, 60), st.integers(1, 8), st.booleans()


def samplers(length: int, world: int, **settings: Any) -> list[ShardedSampler]:
    return [ShardedSampler(length, world, rank, **settings) for rank in range(world)]


def loaded(state: dict[str, Any], length: int, world: int, **settings: Any) -> list[ShardedSampler]:
    """Return samplers resumed from a state that went through JSON."""
    resumed = samplers(length, world, **settings)
    for sampler in resumed:
        sampler.load_state_dict(json.loads(json.dumps(state)))
    return resumed


@given(length=st.integers(1, 60), world=worlds, shuffle=flags, drop_last=flags)
def test_counts_equal_those_of_torchs_sampler(
    length: int, world: int, shuffle: bool, drop_last: bool
) -> None:
    for rank, mine in enumerate(samplers(length, world, shuffle=shuffle, drop_last=drop_last)):
        theirs: DistributedSampler[Any] = DistributedSampler(
            TensorDataset(torch.arange(length)), world, rank, shuffle, 0, drop_last
        )
        # torch returns a negative length if dropping leaves nothing.
        assert len(mine) == len(list(mine)) == max(len(theirs), 0)
        if not shuffle and len(mine):
            assert list(mine) == list(theirs)


@given(length=lengths, world=worlds, shuffle=flags, epoch=st.integers(0, 3))
def test_all_replicas_together_read_every_record(length: int, world: int, shuffle: bool, epoch: int) -> None:
    hands = []
    for sampler in samplers(length, world, shuffle=shuffle):
        sampler.set_epoch(epoch)
        hands.append(list(sampler))
    assert len({len(hand) for hand in hands}) == 1
    read = Counter(chain(*hands))
    assert set(read) == set(range(length))
    # Repeats are as few as possible, and spread over the dataset if there are more replicas than records.
    assert sum(read.values()) - length == -length % world
    assert max(read.values(), default=1) - min(read.values(), default=1) <= 1


@given(length=lengths, world=worlds, shuffle=flags)
def test_the_unrepeated_sampler_reads_every_record_exactly_once(
    length: int, world: int, shuffle: bool
) -> None:
    parts = [UnrepeatedSampler(length, world, rank, shuffle) for rank in range(world)]
    hands = [list(part) for part in parts]
    assert sorted(chain(*hands)) == list(range(length))
    assert [len(part) for part in parts] == [len(hand) for hand in hands]
    assert max(map(len, hands)) - min(map(len, hands)) <= 1


@given(
    length=lengths,
    shuffle=flags,
    epoch=st.integers(0, 2),
    runs=st.lists(st.tuples(worlds, st.integers(0, 12)), min_size=1, max_size=4),
    drop_last=flags,
)
def test_resumed_runs_of_any_sizes_read_every_record_once(
    length: int, shuffle: bool, epoch: int, runs: list[tuple[int, int]], drop_last: bool
) -> None:
    settings: dict[str, Any] = {"shuffle": shuffle, "seed": 5, "drop_last": drop_last}
    state, read = None, []
    for world, steps in runs:
        group = loaded(state, length, world, **settings) if state else samplers(length, world, **settings)
        for sampler in group:
            sampler.set_epoch(epoch)
        hands = [list(sampler) for sampler in group]
        consumed = min(steps, len(hands[0]))
        read += [record for turn in zip(*(hand[:consumed] for hand in hands), strict=True) for record in turn]
        states = [sampler.state_dict(consumed) for sampler in group]
        assert states == states[:1] * world
        state = states[0]
        if consumed == len(hands[0]):
            break
    assert state is not None
    rest = loaded(state, length, 1, **settings)[0]
    rest_count = len(rest)
    read += list(rest)
    whole = list(loaded({**state, "position": 0}, length, 1, **settings)[0])
    # Repeats come last only, and dropping omits at most the last group.
    assert read[:length] == whole[: len(read)]
    assert drop_last or len(read) >= length
    assert rest_count == 0 or len(read) == length
    assert sorted(rest) == list(range(length))


@given(length=st.integers(1, 60), world=worlds, consumed=st.integers(0, 60))
def test_the_same_number_of_replicas_resumes_with_the_same_records(
    length: int, world: int, consumed: int
) -> None:
    for rank, sampler in enumerate(samplers(length, world)):
        hand = list(sampler)
        consumed = min(consumed, len(hand))
        resumed = loaded(sampler.state_dict(consumed), length, world)[rank]
        assert len(resumed) == len(hand) - consumed
        assert list(resumed) == hand[consumed:]


def test_epochs_after_a_resumed_one_are_whole() -> None:
    sampler = ShardedSampler(10, 2, 0)
    sampler.set_epoch(3)
    hand = list(sampler)
    resumed = loaded(sampler.state_dict(2), 10, 2)[0]
    assert resumed.epoch == 3
    # A loop sets the epoch before each iteration, the resumed one included.
    resumed.set_epoch(3)
    assert list(resumed) == hand[2:]
    resumed.set_epoch(4)
    sampler.set_epoch(4)
    assert (len(resumed), list(resumed)) == (5, list(sampler))


def test_setting_another_epoch_drops_the_loaded_position() -> None:
    resumed = loaded(ShardedSampler(10, 1, 0).state_dict(4), 10, 1)[0]
    resumed.set_epoch(1)
    assert sorted(resumed) == list(range(10))


def test_a_state_counts_used_records_and_not_prefetched_ones() -> None:
    sampler = ShardedSampler(100, 2, 0, shuffle=False)
    loader = DataLoader(TensorDataset(torch.arange(100)), batch_size=5, sampler=sampler)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    assert next(iter(loaded(sampler.state_dict(10), 100, 2, shuffle=False)[0])) == 20


def test_each_pair_of_epoch_and_seed_has_its_own_order() -> None:
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1)):
        sampler = ShardedSampler(50, 1, 0, seed=seed)
        sampler.set_epoch(epoch)
        orders.append(tuple(sampler))
    assert len(set(orders)) == 4


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dataset": 11}, "length=10, and ShardedSampler has length=11"),
        ({"seed": 1}, "seed=0, and ShardedSampler has seed=1"),
        ({"shuffle": False}, "shuffle=True, and ShardedSampler has shuffle=False"),
    ],
)
def test_a_state_of_other_data_or_another_order_is_refused(changed: dict[str, Any], said: str) -> None:
    state = ShardedSampler(10, 2, 0).state_dict(1)
    sampler = ShardedSampler(**{"dataset": 10, "num_replicas": 2, "rank": 0, **changed})
    with pytest.raises(ValueError, match=said):
        sampler.load_state_dict(state)


def test_the_seed_does_not_matter_without_shuffling() -> None:
    state = ShardedSampler(10, 1, 0, shuffle=False, seed=1).state_dict(3)
    assert list(loaded(state, 10, 1, shuffle=False, seed=2)[0]) == list(range(3, 10))


def test_datasets_smaller_than_the_number_of_replicas() -> None:
    assert [list(sampler) for sampler in samplers(0, 3)] == [[], [], []]
    assert [list(sampler) for sampler in samplers(2, 5, shuffle=False)] == [[0], [1], [0], [1], [0]]
    assert [len(sampler) for sampler in samplers(2, 5, drop_last=True)] == [0] * 5
    assert [len(UnrepeatedSampler(range(2), 5, rank)) for rank in range(5)] == [1, 1, 0, 0, 0]


def test_a_hundred_billion_records_start_at_once() -> None:
    sampler = ShardedSampler(10**11, 8, 3)
    assert 0 <= next(iter(sampler)) < 10**11
    assert len(sampler) == 10**11 // 8
