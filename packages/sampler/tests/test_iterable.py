"""Iterable datasets, divided in each of a DataLoader's workers."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from polyxla_sampler.iterable import ShardedIterable
from polyxla_sampler.loader import shard


class Numbers(IterableDataset[int]):
    """Splits itself among workers as torch's documentation shows; shuffles itself if `shuffled`."""

    def __init__(self, stop: int, shuffled: bool = False) -> None:
        self.stop = stop
        self.start = 0
        self.shuffled = shuffled
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        mine = list(range(self.start, self.stop)[info.id :: info.num_workers] if info else range(self.stop))
        if self.shuffled:
            random.shuffle(mine)
        return iter([1000 * self.epoch + number for number in mine])


class Sized(Numbers):
    def __len__(self) -> int:
        return self.stop


def read(loader: Any) -> list[int]:
    return [int(record) for batch in loader for record in batch]


def hands(dataset: Numbers, world: int, **settings: Any) -> list[list[int]]:
    return [read(shard(DataLoader(dataset, **settings), rank, world)) for rank in range(world)]


@pytest.mark.parametrize("stop", [0, 1, 3, 12, 13])
def test_each_record_goes_to_the_next_replica(stop: int) -> None:
    found = hands(Numbers(stop), 4, batch_size=2)
    assert len({len(hand) for hand in found}) == 1
    dealt = list(chain.from_iterable(zip(*found, strict=True)))
    assert dealt[:stop] == list(range(stop))
    assert dealt[stop:] == [place % stop for place in range(len(dealt) - stop)]


def test_drop_last_drops_the_remainder_unless_repeat_is_false() -> None:
    loader = DataLoader(Numbers(11), batch_size=1, drop_last=True)
    assert [read(shard(loader, rank, 4)) for rank in (0, 3)] == [[0, 4], [3, 7]]
    assert [read(shard(loader, rank, 4, repeat=False)) for rank in (0, 3)] == [[0, 4, 8], [3, 7]]


@pytest.mark.parametrize("drop_last", [False, True], ids=["whole", "drop-last"])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_has_every_record_of_a_stream_once(workers: int, drop_last: bool) -> None:
    options: Any = {"batch_size": 3, "num_workers": workers, "drop_last": drop_last}
    for stop in (0, 1, 5, 8, 9) if workers == 0 else (13, 17):
        # Each worker reads every second record; the replicas divide these.
        streams = [range(stop)[first :: workers or 1] for first in range(workers or 1)]
        full = [-(-len(stream) // 4) // 3 * 3 if drop_last else stop for stream in streams]
        expected = [
            stream[i]
            for stream, most in zip(streams, full, strict=True)
            for i in range(len(stream))[: 4 * most]
        ]
        loaders = [shard(DataLoader(Numbers(stop), **options), rank, 4, repeat=False) for rank in range(4)]
        assert sorted(chain(*map(read, loaders))) == sorted(expected)
        for each in loaders:
            assert each is not None
            each.set_epoch(0)
        lengths = {len(list(each.marked())) for each in loaders if each is not None}
        assert len(lengths) == 1, "all replicas get the same number of batches"


def test_a_repeat_without_batches_is_marked() -> None:
    loader = DataLoader(Numbers(3), batch_size=None)
    sharded = shard(loader, 1, 2, repeat=False)
    assert sharded is not None
    assert list(sharded.marked()) == [(1, False), (0, True)]


def test_each_workers_stream_is_divided_separately() -> None:
    found = hands(Numbers(23), 2, batch_size=3, num_workers=2)
    # 12 records of one worker and 11 of the other: the second repeats its first.
    assert [len(hand) for hand in found] == [12, 12]
    assert Counter(chain(*found)) == Counter([*range(23), 1])


def test_workers_can_be_spawned() -> None:
    loader = DataLoader(Numbers(9), batch_size=3, num_workers=1, multiprocessing_context="spawn")
    sharded = shard(loader, 1, 2)
    assert sharded is not None
    sharded.load_state_dict({"streams": 1, "epoch": 4, "position": [2]})
    assert read(sharded) == [4003, 4005, 4007, 4000]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_draws_the_same_numbers_in_all_replicas(workers: int) -> None:
    found = []
    for rank in range(2):
        random.seed(rank)
        torch.manual_seed(rank)
        sharded = shard(DataLoader(Numbers(20, shuffled=True), num_workers=workers), rank, 2)
        found.append([read(sharded), read(sharded)])
    first, second = (list(chain(*epoch)) for epoch in zip(*found, strict=True))
    assert sorted(first) == list(range(20))
    assert sorted(second) == list(range(1000, 1020))
    assert first != [record - 1000 for record in second]


def test_persistent_workers_get_the_epoch_and_the_position() -> None:
    loader = DataLoader(Numbers(8), batch_size=2, num_workers=2, persistent_workers=True)
    sharded = shard(loader, 0, 1)
    assert sharded is not None
    assert [sorted(read(sharded)) for _ in range(2)] == [list(range(8)), list(range(1000, 1008))]
    sharded.load_state_dict({"streams": 2, "epoch": 5, "position": [2, 0]})
    assert sorted(read(sharded)) == [5001, 5003, 5004, 5005, 5006, 5007]
    assert len(read(sharded)) == 8


@pytest.mark.parametrize(("workers", "stop"), [(0, 30), (2, 40)])
def test_resumed_runs_of_any_sizes_read_every_record_once(workers: int, stop: int) -> None:
    got: list[int] = []
    state = None
    for world, batches in ((2, 3), (4, 1), (1, 2), (2, 99)):
        states = []
        for rank in range(world):
            sharded = shard(DataLoader(Numbers(stop), batch_size=2, num_workers=workers), rank, world)
            assert sharded is not None
            if state:
                sharded.load_state_dict(json.loads(json.dumps(state)))
            each = list(sharded)
            got += chain.from_iterable(batch.tolist() for batch in each[:batches])
            states.append(sharded.state_dict(min(batches, len(each))))
        assert states == states[:1] * world
        state = states[0]
    assert sorted(got) == list(range(stop))


def test_a_finished_epoch_resumes_with_what_drop_last_dropped() -> None:
    loader = DataLoader(Numbers(11), batch_size=1, drop_last=True)
    whole, resumed = shard(loader, 0, 4), shard(loader, 0, 1)
    assert whole is not None
    assert resumed is not None
    assert read(whole) == [0, 4]
    resumed.load_state_dict(whole.state_dict(2))
    assert read(resumed) == [8, 9, 10]


def test_streams_may_end_at_different_times() -> None:
    class Uneven(Numbers):
        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            return iter(range(4) if info and info.id == 1 else range(100, 120))

    first, resumed = (shard(DataLoader(Uneven(0), batch_size=2, num_workers=2), 0, 1) for _ in range(2))
    assert first is not None
    assert resumed is not None
    before = [batch.tolist() for batch in first][:9]
    resumed.load_state_dict(first.state_dict(9))
    assert sorted(chain(*before, read(resumed))) == [*range(4), *range(100, 120)]


def test_another_number_of_workers_cannot_resume() -> None:
    one, two = (shard(DataLoader(Numbers(8), num_workers=workers), 0, 1) for workers in (0, 2))
    assert one is not None
    assert two is not None
    with pytest.raises(ValueError, match="streams=1, and StreamEpochs has streams=2"):
        two.load_state_dict(one.state_dict(0))


def narrowed(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.start = info.dataset.stop - 4  # type: ignore[attr-defined]


def test_a_worker_init_fn_can_change_the_dataset() -> None:
    loader = DataLoader(Numbers(20), num_workers=2, worker_init_fn=narrowed)
    assert sorted(read(shard(loader, 0, 1))) == [16, 17, 18, 19]


def test_the_length_is_this_replicas_share() -> None:
    sharded = shard(DataLoader(Sized(21), batch_size=4, num_workers=2), 0, 2)
    assert sharded is not None
    assert len(sharded) == 3
    # torch must not warn; a warning is an error here.
    assert len(read(sharded)) == 6 + 5
    sharded.load_state_dict({"streams": 2, "epoch": 0, "position": [8, 8]})
    assert len(sharded) == 1
    assert sharded.batch_size == 4
    unsized = shard(DataLoader(Numbers(4)), 0, 1)
    assert unsized is not None
    with pytest.raises(TypeError):
        len(unsized)


def test_a_sharded_iterable_works_without_shard() -> None:
    dataset = ShardedIterable(Numbers(10), num_replicas=2, rank=1)
    assert list(dataset) == [1, 3, 5, 7, 9]
    dataset.set_epoch(2)
    assert list(dataset) == [2001, 2003, 2005, 2007, 2009]
    with pytest.raises(ValueError, match="worker 1 has no stream"):
        list(DataLoader(dataset, num_workers=2))
