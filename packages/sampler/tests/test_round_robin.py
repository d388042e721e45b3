"""Round-robin division, and the treatment of the remainder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, TensorDataset

from polyxla_sampler.epochs import Division, Remainder, resolve_rank, round_robin

counts, groups = st.integers(0, 40), st.integers(1, 9)
remainders = st.sampled_from(["repeat", "drop", "keep"])


@given(items=counts, replicas=groups, remainder=remainders, start=st.integers(0, 45))
def test_each_replica_gets_the_items_that_the_division_counts(
    items: int, replicas: int, remainder: Remainder, start: int
) -> None:
    division = Division(max(items - start, 0), replicas, remainder)
    hands = [list(round_robin(range(items), start, replicas, rank, remainder)) for rank in range(replicas)]
    assert [len(hand) for hand in hands] == [division.count(rank) for rank in range(replicas)]
    valid = sorted(item for rank, hand in enumerate(hands) for item in hand[: division.valid(rank)])
    kept = items - max(items - start, 0) % replicas if remainder == "drop" else items
    assert valid == list(range(start, kept))


@given(items=st.integers(1, 40), replicas=groups, drop_last=st.booleans())
def test_items_are_divided_as_by_torchs_sampler(items: int, replicas: int, drop_last: bool) -> None:
    for rank in range(replicas):
        theirs: DistributedSampler[Any] = DistributedSampler(
            TensorDataset(torch.arange(items)), replicas, rank, False, 0, drop_last
        )
        remainder: Remainder = "drop" if drop_last else "repeat"
        if drop_last and items < replicas:
            # torch refuses to iterate here, because dropping leaves no records.
            assert list(round_robin(range(items), 0, replicas, rank, remainder)) == []
        else:
            assert list(round_robin(range(items), 0, replicas, rank, remainder)) == list(theirs)


def test_at_most_one_item_per_replica_is_read_ahead() -> None:
    read: list[int] = []
    hand = round_robin((read.append(item) or item for item in range(100)), 0, 4, 1, "repeat")  # type: ignore[func-returns-value]
    assert [next(hand), next(hand)] == [1, 5]
    assert read == list(range(8))


def test_repeats_after_a_start_are_the_epochs_first_items() -> None:
    assert [list(round_robin("abcdefg", 4, 2, rank, "repeat")) for rank in (0, 1)] == [["e", "g"], ["f", "a"]]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_out_of_range_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank={rank} is not one of 4 replicas"):
        resolve_rank(4, rank)


def test_without_torch_distributed_the_rank_must_be_given() -> None:
    for arguments in ((None, 0), (2, None), (None, None)):
        with pytest.raises(ValueError, match=r"not initialized. Pass num_replicas= and rank="):
            resolve_rank(*arguments)


def test_torch_distributed_gives_the_rank(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert resolve_rank(None, None) == (1, 0)
        assert resolve_rank(8, None) == (8, 0)
    finally:
        dist.destroy_process_group()
