"""Dealing items in turn, and what happens where they do not go round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, TensorDataset

from polyxla_sampler.round_robin import Division, Last, deal, own_place

counts, groups = st.integers(0, 40), st.integers(1, 9)
lasts = st.sampled_from(["repeat", "drop", "keep"])


@given(items=counts, replicas=groups, last=lasts, start=st.integers(0, 45))
def test_what_is_dealt_is_what_the_division_says(items: int, replicas: int, last: Last, start: int) -> None:
    division = Division(max(items - start, 0), replicas, last)
    hands = [list(deal(range(items), start, replicas, rank, last)) for rank in range(replicas)]
    assert [len(hand) for hand in hands] == [division.count(rank) for rank in range(replicas)]
    valid = sorted(item for rank, hand in enumerate(hands) for item in hand[: division.valid(rank)])
    kept = items - max(items - start, 0) % replicas if last == "drop" else items
    assert valid == list(range(start, kept))


@given(items=st.integers(1, 40), replicas=groups, drop_last=st.booleans())
def test_it_deals_as_torch_does(items: int, replicas: int, drop_last: bool) -> None:
    for rank in range(replicas):
        theirs: DistributedSampler[Any] = DistributedSampler(
            TensorDataset(torch.arange(items)), replicas, rank, False, 0, drop_last
        )
        last: Last = "drop" if drop_last else "repeat"
        if drop_last and items < replicas:
            # torch refuses to iterate here; there is nothing to drop that would leave any.
            assert list(deal(range(items), 0, replicas, rank, last)) == []
        else:
            assert list(deal(range(items), 0, replicas, rank, last)) == list(theirs)


def test_no_more_than_a_group_is_read_ahead() -> None:
    read: list[int] = []
    hand = deal((read.append(item) or item for item in range(100)), 0, 4, 1, "repeat")  # type: ignore[func-returns-value]
    assert [next(hand), next(hand)] == [1, 5]
    assert read == list(range(8))


def test_what_is_repeated_after_a_start_are_the_epochs_first() -> None:
    assert [list(deal("abcdefg", 4, 2, rank, "repeat")) for rank in (0, 1)] == [["e", "g"], ["f", "a"]]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_is_none_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank={rank} is not one of 4 replicas"):
        own_place(4, rank)


def test_without_torch_distributed_the_place_must_be_given() -> None:
    for place in ((None, 0), (2, None), (None, None)):
        with pytest.raises(ValueError, match=r"not initialised. Pass num_replicas= and rank="):
            own_place(*place)


def test_torch_distributed_knows_the_place(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert own_place(None, None) == (1, 0)
        assert own_place(8, None) == (8, 0)
    finally:
        dist.destroy_process_group()
