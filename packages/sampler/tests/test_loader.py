"""The records that each replica's loader reads, the arguments that it keeps, and how it resumes."""

from __future__ import annotations

import inspect
import json
import os
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from polyxla_sampler.buckets import BucketBatchSampler
from polyxla_sampler.loader import ShardedLoader, shard
from polyxla_sampler.sampler import ShardedSampler


def records(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def sharded(loader: Any, index: int, count: int, **options: Any) -> ShardedLoader:
    found = shard(loader, index, count, **options)
    assert found is not None
    return found


def read(loader: Any) -> list[int]:
    return [int(record) for (batch,) in loader for record in batch]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in order"])
def test_replicas_read_every_record_once(replicas: int, shuffle: bool) -> None:
    loader = DataLoader(records(24), batch_size=2, shuffle=shuffle)
    parts = [read(shard(loader, index, replicas)) for index in range(replicas)]
    assert sorted(chain(*parts)) == list(range(24))
    assert {len(part) for part in parts} == {24 // replicas}


def test_one_replica_reads_as_the_plain_loader_does() -> None:
    loader = DataLoader(records(11), batch_size=4)
    assert [batch.tolist() for (batch,) in sharded(loader, 0, 1)] == [b.tolist() for (b,) in loader]


def test_the_remainder_is_repeated_or_dropped() -> None:
    padded = [read(shard(DataLoader(records(10), batch_size=2), index, 4)) for index in range(4)]
    assert [len(part) for part in padded] == [3] * 4
    assert set(chain(*padded)) == set(range(10))
    dropped = [read(shard(DataLoader(records(10), batch_size=2, drop_last=True), i, 4)) for i in range(4)]
    assert [len(part) for part in dropped] == [2] * 4


def test_each_epoch_has_a_new_order_that_the_replicas_share() -> None:
    loaders = [sharded(DataLoader(records(32), batch_size=4, shuffle=True), index, 2) for index in range(2)]
    first, second = ([read(loader) for loader in loaders] for _ in range(2))
    assert first != second
    assert sorted(chain(*second)) == list(range(32))
    for loader in loaders:
        loader.set_epoch(0)
    assert [read(loader) for loader in loaders] == first


def identity(batch: list[Any]) -> list[Any]:
    return batch


def nothing(worker_id: int) -> None:
    pass


ARGUMENTS = {
    "batch_size": 3,
    "num_workers": 1,
    "collate_fn": identity,
    "pin_memory": False,
    "drop_last": True,
    "timeout": 7,
    "worker_init_fn": nothing,
    "multiprocessing_context": torch.multiprocessing.get_context("spawn"),
    "generator": torch.Generator(),
    "prefetch_factor": 3,
    "persistent_workers": True,
    "pin_memory_device": "",
    "in_order": False,
}


def test_every_argument_of_a_loader_is_kept() -> None:
    replaced = {"self", "dataset", "shuffle", "sampler", "batch_sampler"}
    # Fails if a new version of torch adds an argument: add a value for it to the table.
    assert inspect.signature(DataLoader.__init__).parameters.keys() - replaced == ARGUMENTS.keys()
    loader: DataLoader[Any] = DataLoader(records(8), shuffle=True, **ARGUMENTS)  # type: ignore[arg-type]
    rebuilt = sharded(loader, 0, 2).loader
    assert {name: getattr(rebuilt, name) for name in ARGUMENTS} == ARGUMENTS
    pinned: DataLoader[Any] = DataLoader(records(8), pin_memory=True)
    assert sharded(pinned, 0, 2).loader.pin_memory


def test_a_loader_without_batches_has_none_afterwards() -> None:
    loader = DataLoader(records(6), batch_size=None)
    mine = sharded(loader, 1, 2)
    assert [int(record) for (record,) in mine] == [1, 3, 5]
    assert (mine.batch_size, len(mine)) == (None, 3)
    assert read([[torch.tensor([2])]]) == [2]
    resumed = sharded(loader, 1, 2)
    resumed.load_state_dict(mine.state_dict(2))
    assert [int(record) for (record,) in resumed] == [5]


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (2 * batch for (batch,) in super().__iter__())


class Renamed(DataLoader[Any]):
    def __init__(self, data: Dataset[Any], size: int) -> None:
        super().__init__(data, batch_size=size)


def test_a_loader_class_is_kept_if_it_takes_dataloaders_arguments() -> None:
    mine = sharded(Doubling(records(4), batch_size=2), 1, 2)
    assert [batch.tolist() for batch in mine] == [[2, 6]]
    renamed = sharded(Renamed(records(4), 2), 1, 2)
    assert read(renamed) == [1, 3]
    assert "a plain DataLoader loads them, because Renamed" in renamed.note


CASES: dict[str, Any] = {
    "in order": lambda size: DataLoader(records(26), batch_size=size),
    "shuffled": lambda size: DataLoader(records(26), batch_size=size, shuffle=True),
    "subset": lambda size: DataLoader(records(26), size, sampler=SubsetRandomSampler(range(26))),
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
@given(
    runs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=3)
)
@settings(max_examples=25)
def test_resumed_runs_of_any_sizes_load_every_record_once(
    make: Any, runs: list[tuple[int, int, int]]
) -> None:
    state: Any = None
    got: list[int] = []
    for world, size, batches in [*runs, (1, 4, 99)]:
        states, rounds = [], []
        for index in range(world):
            mine = sharded(make(size), index, world, seed=2)
            if state:
                mine.load_state_dict(json.loads(json.dumps(state)))
            rounds.append(read(islice(iter(mine), batches)))
            states.append(mine.state_dict(batches))
        assert states == states[:1] * world
        state = states[0]
        # Round-robin, so that the repeats of the first records come last.
        dealt = list(chain(*zip(*rounds, strict=True)))
        got += dealt[: 26 - len(got)]
    assert sorted(got) == list(range(26))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_counts_used_batches_and_the_next_epochs_are_whole(workers: int) -> None:
    loader = DataLoader(records(40), batch_size=4, shuffle=True, num_workers=workers)
    mine, resumed = sharded(loader, 0, 2), sharded(loader, 0, 2)
    epochs = [read(mine), read(mine)]
    mine.set_epoch(0)
    batches = iter(mine)
    next(batches)
    resumed.load_state_dict(mine.state_dict(1))
    assert len(resumed) == 4
    assert read(resumed) == epochs[0][4:]
    assert len(resumed) == 5
    assert read(resumed) == epochs[1]


def test_calls_between_iter_and_the_first_batch_do_not_change_the_iteration() -> None:
    loader = DataLoader(records(12), batch_size=2, shuffle=True)
    mine = sharded(loader, 0, 1)
    expected = read(mine)
    resumed = sharded(loader, 0, 1)
    resumed.load_state_dict(mine.state_dict(2))
    batches = iter(resumed)
    assert len(resumed) == 6
    assert resumed.state_dict(0) == mine.state_dict(2)
    assert read(batches) == expected[4:]


def test_a_finished_epoch_resumes_empty_with_drop_last() -> None:
    loader = DataLoader(records(23), batch_size=4, drop_last=True)
    mine = sharded(loader, 0, 2)
    assert len(list(mine)) == 2
    for world in (1, 2):
        resumed = sharded(loader, 0, world)
        resumed.load_state_dict(mine.state_dict(2))
        assert (len(resumed), list(resumed)) == (0, [])
        assert len(list(resumed)) == len(resumed) > 0


def test_any_sampler_is_divided_by_its_items() -> None:
    def hands(make: Any) -> list[list[int]]:
        return [read(shard(DataLoader(records(30), 2, sampler=make()), index, 3)) for index in range(3)]

    assert sorted(chain(*hands(lambda: SubsetRandomSampler(range(6, 30))))) == list(range(6, 30))
    assert [len(hand) for hand in hands(lambda: WeightedRandomSampler([1.0] * 30, 10))] == [4, 4, 4]
    with_replacement = hands(lambda: RandomSampler(range(30), replacement=True))
    assert len(set(chain(*with_replacement))) < 30
    assert sorted(chain(*hands(lambda: RandomSampler(range(30), num_samples=60))))[:4] == [0, 0, 1, 1]
    assert hands(lambda: [5, 3, 1]) == [[5], [3], [1]]


def test_batches_of_a_batch_sampler_stay_whole() -> None:
    batches = BatchSampler(SequentialSampler(range(11)), 2, drop_last=False)
    loader = DataLoader(records(11), batch_sampler=batches)
    loaders = [sharded(loader, index, 4) for index in range(4)]
    found = [[batch.tolist() for (batch,) in each] for each in loaders]
    assert found == [[[0, 1], [8, 9]], [[2, 3], [10]], [[4, 5], [0, 1]], [[6, 7], [2, 3]]]
    loaders = [sharded(loader, index, 4, repeat=False) for index in range(4)]
    assert [[(len(batch), repeats) for (batch,), repeats in each.marked()] for each in loaders] == [
        [(2, False), (2, False)],
        [(2, False), (1, False)],
        [(2, False), (2, True)],
        [(2, False), (2, True)],
    ]
    assert (loaders[0].batch_size, len(loaders[0])) == (2, 2)
    resumed = sharded(loader, 0, 2)
    resumed.load_state_dict(loaders[0].state_dict(1))
    assert [batch.tolist() for (batch,) in resumed] == [[8, 9]]


@given(length=st.integers(1, 30), world=st.integers(1, 5), size=st.integers(1, 4), drop=st.booleans())
@settings(max_examples=40)
def test_an_evaluation_has_every_record_once_and_as_many_batches_in_each_replica(
    length: int, world: int, size: int, drop: bool
) -> None:
    loader = DataLoader(records(length), batch_size=size, drop_last=drop)
    loaders = [sharded(loader, index, world, repeat=False) for index in range(world)]
    lengths = {len(each) for each in loaders}
    assert {len(list(each.marked())) for each in loaders} == lengths
    assert len(lengths) == 1
    valid = sorted(chain(*map(read, loaders)))
    if drop:
        whole = -(-length // world) // size * size
        assert valid == [record for record in range(length) if record // world < whole]
    else:
        assert valid == list(range(length))


def test_a_loader_that_is_divided_already_keeps_its_order() -> None:
    data = records(20)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=1, seed=3)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    mine = sharded(loader, 0, 2, seed=9)
    for epoch in range(2):
        found = read(mine)
        sampler.set_epoch(epoch)
        assert found == read(loader)
    assert mine.note == "DistributedSampler divides the records among 2 replica(s) itself"
    resumed = sharded(loader, 0, 2)
    resumed.load_state_dict(json.loads(json.dumps(mine.state_dict(2))))
    assert read(resumed) == found[4:]
    three: DistributedSampler[Any] = DistributedSampler(data, num_replicas=3, rank=0)
    other = sharded(DataLoader(data, sampler=three), 0, 4)
    assert other.note.endswith("among 3 replica(s) itself, although there are 4")
    with pytest.raises(ValueError, match="num_replicas=2, and SelfShardedSampler has num_replicas=3"):
        other.load_state_dict(mine.state_dict(2))


def test_a_sampler_for_one_replica_is_divided_among_several() -> None:
    data = records(20)
    alone: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0)
    parts = [read(sharded(DataLoader(data, sampler=alone), index, 4)) for index in range(4)]
    assert sorted(chain(*parts)) == list(range(20))


def test_samplers_of_this_package_are_kept_and_can_resume() -> None:
    data = records(20)
    loader = DataLoader(data, batch_size=2, sampler=ShardedSampler(data, 2, 0, seed=3))
    mine = sharded(loader, 0, 2)
    assert mine.loader is loader
    found = read(mine)
    resumed = sharded(DataLoader(data, batch_size=5, sampler=ShardedSampler(data, 1, 0, seed=3)), 0, 1)
    resumed.load_state_dict(mine.state_dict(2))
    rest = read(resumed)
    assert set(found[4:]) < set(rest)
    assert not set(found[:4]) & set(rest)
    assert len(rest) == 20 - 2 * 4
    buckets = BucketBatchSampler([1] * 20, [2], 4, num_replicas=2, rank=1)
    batches = sharded(DataLoader(data, batch_sampler=buckets), 1, 2)
    assert len(read(batches)) == 12


def test_an_evaluation_leaves_out_the_repeats_of_a_sampler_of_this_package() -> None:
    loaders = [DataLoader(records(5), 2, sampler=ShardedSampler(5, 2, rank, False)) for rank in range(2)]
    assert [read(sharded(each, 0, 2, repeat=False)) for each in loaders] == [[0, 2, 4], [1, 3]]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_of_records_that_are_no_tensors_has_no_repeat(workers: int) -> None:
    # Slow workers may deliver out of turn, and a repeat would not come last.
    options: Any = {"num_workers": workers, "in_order": workers == 0, "collate_fn": identity}
    texts: Any = list("abcde")
    loaders = [sharded(DataLoader(texts, 2, **options), index, 2, repeat=False) for index in range(2)]
    assert [list(each) for each in loaders] == [[["a", "c"], ["e"]], [["b", "d"]]]
    assert [list(each.marked())[1] for each in loaders] == [(["e"], False), (["a"], True)]


def test_a_finished_evaluation_resumes_empty_with_drop_last() -> None:
    loader = DataLoader(records(5), batch_size=4, drop_last=True)
    mine = sharded(loader, 0, 1, repeat=False)
    assert len(list(mine)) == 1
    resumed = sharded(loader, 0, 1, repeat=False)
    resumed.load_state_dict(mine.state_dict(1))
    assert list(resumed) == []


class Failing(Dataset[int]):
    """Its third record cannot be read; with `dies`, reading any record ends the process."""

    def __init__(self, dies: bool = False) -> None:
        self.dies = dies

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if self.dies:
            os._exit(3)
        if index == 2:
            raise KeyError("record 2")
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_arrives_unchanged(workers: int) -> None:
    mine = sharded(DataLoader(Failing(), num_workers=workers), 0, 1)
    with pytest.raises(KeyError, match="record 2"):
        list(mine)


def test_a_dead_worker_is_reported_by_torch() -> None:
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* exited unexpectedly"):
        list(sharded(DataLoader(Failing(dies=True), num_workers=1), 0, 1))


def test_the_note_says_how_the_loader_was_changed() -> None:
    data = records(4)

    def note(loader: DataLoader[Any], count: int = 2) -> str:
        return sharded(loader, 0, count).note

    assert note(DataLoader(data)) == "each of 2 replicas gets an equal share of the 4 records"
    shuffled = note(DataLoader(data, shuffle=True), 1)
    assert shuffled == "the only replica gets all of the 4 records, in a new order every epoch"
    assert note(DataLoader(data, sampler=[1, 2])).endswith("an equal share of the items of list")


def test_an_object_that_is_not_a_loader_is_left_alone() -> None:
    assert shard([1, 2, 3], 0, 2) is None
