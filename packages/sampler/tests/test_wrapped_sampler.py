"""Any sampler or batch sampler, divided by its items."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from polyxla_sampler.sampler import RoundRobinSampler


class Backwards(Sampler[int]):
    """Has no length and no generator; draws its first index from `random`."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        first = random.randrange(self.length)
        return iter([(first - step) % self.length for step in range(self.length)])


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(100, ()))


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0, 3.0], 23),
    "subset": lambda: SubsetRandomSampler(range(100, 124)),
    "replacement": lambda: RandomSampler(range(9), replacement=True, num_samples=40),
    "its own generator": lambda: RandomSampler(range(24), generator=torch.Generator().manual_seed(4)),
    "without length": lambda: Backwards(21),
    "batches": lambda: BatchSampler(SubsetRandomSampler(range(50)), 4, drop_last=False),
}


def whole(make: Any, epoch: int = 0) -> list[Any]:
    one = RoundRobinSampler(make(), 1, 0, seed=7)
    one.set_epoch(epoch)
    return list(one)


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_replicas_divide_one_sequence_even_if_their_generators_differ(make: Any) -> None:
    drawn, hands = whole(make), []
    for rank in range(4):
        torch.manual_seed(rank)
        random.seed(rank)
        hands.append(list(RoundRobinSampler(make(), 4, rank, seed=7)))
    dealt = list(chain.from_iterable(zip(*hands, strict=True)))
    missing = -len(drawn) % 4
    assert dealt == drawn + drawn[:missing]


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_each_epoch_has_a_reproducible_new_order(make: Any) -> None:
    assert whole(make) == whole(make)
    assert len({str(whole(make, epoch)) for epoch in range(4)}) > 1


@given(
    length=st.integers(0, 40),
    runs=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=3),
    sized=st.booleans(),
)
def test_resumed_runs_of_any_sizes_draw_every_item_once(
    length: int, runs: list[tuple[int, int]], sized: bool
) -> None:
    def make(world: int, rank: int) -> RoundRobinSampler:
        drawn: Any = SubsetRandomSampler(range(length)) if sized or not length else Backwards(length)
        return RoundRobinSampler(drawn, world, rank, seed=1)

    expected, read, state = list(make(1, 0)), [], None
    for world, steps in runs:
        group = [make(world, rank) for rank in range(world)]
        for sampler in group:
            if state:
                sampler.load_state_dict(json.loads(json.dumps(state)))
        hands = [list(sampler) for sampler in group]
        consumed = min(steps, len(hands[0]))
        read += list(chain.from_iterable(zip(*(hand[:consumed] for hand in hands), strict=True)))
        states = [sampler.state_dict(consumed) for sampler in group]
        assert states == states[:1] * world
        state = states[0]
    last = make(1, 0)
    assert state is not None
    last.load_state_dict(state)
    read += list(last)
    assert read[:length] == expected
    # The rest are repeats at the end of an epoch, at most once per run.
    assert set(read) == set(expected)


def test_drop_last_drops_the_remainder() -> None:
    hands = [list(RoundRobinSampler(range(11), 4, rank, drop_last=True)) for rank in range(4)]
    assert hands == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert len(RoundRobinSampler(range(11), 4, 0, drop_last=True)) == 2


def test_an_endless_sampler_is_read_lazily() -> None:
    hands = [list(islice(RoundRobinSampler(Endless(), 2, rank), 1500)) for rank in (0, 1)]
    assert len(set(zip(*hands, strict=True))) > 1000
    with pytest.raises(TypeError, match="has no len"):
        len(RoundRobinSampler(Endless(), 2, 0))


def test_set_epoch_is_called_at_any_depth() -> None:
    class RecordsEpochs(Sampler[int]):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    sampler = RoundRobinSampler(BatchSampler(RecordsEpochs(), 2, drop_last=False), 2, 0)
    list(sampler)
    sampler.set_epoch(5)
    list(sampler)
    assert RecordsEpochs.epochs == [0, 5]


def test_a_state_of_another_length_or_seed_is_refused() -> None:
    state = RoundRobinSampler(range(9), 2, 0).state_dict(1)
    with pytest.raises(ValueError, match="items=9, and RoundRobinSampler has items=8"):
        RoundRobinSampler(range(8), 2, 0).load_state_dict(state)
    with pytest.raises(ValueError, match="seed=0, and RoundRobinSampler has seed=3"):
        RoundRobinSampler(range(9), 2, 0, seed=3).load_state_dict(state)
