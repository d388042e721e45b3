"""Which records each replica's loader reads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from polyxla_sampler.loader import shard


def records(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def read(loader: Any) -> list[int]:
    return [int(record) for (batch,) in loader for record in batch]


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in order"])
def test_replicas_read_every_record_once(replicas: int, shuffle: bool) -> None:
    loader = DataLoader(records(24), batch_size=2, shuffle=shuffle)
    parts = [read(shard(loader, index, replicas)) for index in range(replicas)]
    assert sorted(chain(*parts)) == list(range(24))
    assert {len(part) for part in parts} == {24 // replicas}


def test_what_does_not_divide_is_repeated_or_dropped() -> None:
    padded = [read(shard(DataLoader(records(10), batch_size=2), index, 4)) for index in range(4)]
    assert [len(part) for part in padded] == [3] * 4
    assert set(chain(*padded)) == set(range(10))
    dropped = [read(shard(DataLoader(records(10), batch_size=2, drop_last=True), i, 4)) for i in range(4)]
    assert [len(part) for part in dropped] == [2] * 4


def test_each_epoch_has_an_order_of_its_own_that_the_replicas_share() -> None:
    loaders = [shard(DataLoader(records(32), batch_size=4, shuffle=True), index, 2) for index in range(2)]
    first, second = ([read(loader) for loader in loaders] for _ in range(2))
    assert first != second
    assert sorted(chain(*second)) == list(range(32))


def test_the_loaders_other_arguments_are_kept() -> None:
    def collate(batch: list[Any]) -> list[Any]:
        return batch

    loader = DataLoader(records(8), batch_size=3, drop_last=True, collate_fn=collate, timeout=0)
    sharded = shard(loader, 0, 2)
    assert sharded is not None
    rebuilt = sharded.loader
    assert (rebuilt.batch_size, rebuilt.drop_last, rebuilt.collate_fn) == (3, True, collate)
    assert len(sharded) == 1


def test_a_loader_that_is_divided_already_is_left_alone() -> None:
    data = records(8)
    loader = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    assert shard(loader, 0, 2) is loader


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    "loader",
    [
        [1, 2, 3],
        DataLoader(Stream()),
        DataLoader(records(4), sampler=WeightedRandomSampler([1.0] * 4, 4)),
        DataLoader(records(4), batch_sampler=[[0, 1], [2, 3]]),
    ],
    ids=["a list", "an iterable dataset", "a sampler of its own", "a batch sampler of its own"],
)
def test_what_it_cannot_divide_it_leaves_to_others(loader: Any) -> None:
    assert shard(loader, 0, 2) is None
