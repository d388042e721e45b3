"""The services of Replica, on a real runtime, on one replica and on four.

Starting replicas takes time, so each number of replicas is launched once and runs every exercise; the tests
check the results.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from polyxla import Replica
from polyxla_sampler import BucketBatchSampler, BucketCollate
from polyxla_testing import RuntimeUnderTest
from polyxla_training import load, save

# Batches that are on the device, by default, while the loop works on its first, and the wait for them.
AHEAD, READ_AHEAD_S = 8, 2.0

Answers = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[1, 4], ids=["1-replica", "4-replicas"])
def answers(
    request: pytest.FixtureRequest, runtime: RuntimeUnderTest, tmp_path_factory: pytest.TempPathFactory
) -> Answers:
    """The results of the exercises in each replica, in ordinal order."""
    directory = tmp_path_factory.mktemp("services")
    results: Answers = runtime.launch(_exercise, directory, devices=request.param)
    return results


def _exercise(replica: Replica, directory: Path) -> dict[str, Any]:
    return {function.__name__: function(replica, directory) for function in EXERCISES}


EXERCISES: list[Callable[[Replica, Path], Any]] = []


def exercise(function: Callable[[Replica, Path], Any]) -> Callable[[Replica, Path], Any]:
    """Register a function to run once in every replica; tests find its result under its name."""
    EXERCISES.append(function)
    return function


def _numbers(count: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), batch_size, **options)


def _compiles(replica: Replica) -> int:
    counters = replica.counters()
    assert counters is not None
    return counters.counts().compiles


@exercise
def shuffled(replica: Replica, directory: Path) -> list[list[int]]:
    loader = replica.loader(_numbers(40, 5, shuffle=True))
    return [[value for (batch,) in loader for value in batch.tolist()] for _ in range(2)]


@pytest.mark.slow
def test_each_epoch_has_every_record_in_a_new_order(answers: Answers) -> None:
    for epoch in (0, 1):
        assert sorted(value for answer in answers for value in answer["shuffled"][epoch]) == list(range(40))
    first, second = answers[0]["shuffled"]
    assert first != second
    assert first != sorted(first)


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(37))


@exercise
def streamed(replica: Replica, directory: Path) -> list[int]:
    # Without the last batch, so that every replica has the same number.
    loader = replica.loader(DataLoader(_Stream(), 3, drop_last=True))
    return [value for batch in loader for value in batch.tolist()]


def test_an_iterable_dataset_is_divided(answers: Answers) -> None:
    values = [value for answer in answers for value in answer["streamed"]]
    assert len(values) == len(set(values)) == 36
    assert {len(answer["streamed"]) for answer in answers} == {36 // len(answers)}


class _CountsReads(Dataset[torch.Tensor]):
    """Counts the records that were read."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        return torch.tensor(float(index))


@exercise
def read_ahead(replica: Replica, directory: Path) -> list[int]:
    counts = []
    for prefetch in (None, {"loader_prefetch_size": 1, "device_prefetch_size": 1}):
        dataset = _CountsReads()
        for _ in replica.loader(DataLoader(dataset, 1), prefetch=prefetch):
            # A thread may read on while the loop works on its first batch.
            deadline = time.monotonic() + READ_AHEAD_S
            while dataset.read < AHEAD and time.monotonic() < deadline:
                time.sleep(0.01)
            counts.append(dataset.read)
            break
    return counts


def test_batches_are_prefetched_as_far_as_the_options_say(answers: Answers) -> None:
    for answer in answers:
        by_default, limited = answer["read_ahead"]
        assert by_default >= AHEAD
        assert limited <= 5


@exercise
def padded(replica: Replica, directory: Path) -> dict[str, Any]:
    module = replica.setup(_seeded(lambda: nn.Linear(1, 1)))
    loader = replica.loader(_numbers(22, 4), pad=True, repeat=False)
    compiles, shapes = [], set()
    real: list[int] = []
    with torch.no_grad():
        for (batch,) in loader:
            shapes.add(tuple(batch.shape))
            total = torch.where(loader.valid, module(batch[:, None].float())[:, 0], 0).sum()
            replica.sync(wait=True)
            compiles.append(_compiles(replica))
            real += batch.cpu()[loader.valid.cpu()].tolist() if loader.real else []
            del total
    return {
        "shapes": shapes,
        "after_first": compiles[-1] - compiles[0],
        "real": real,
        "batches": len(compiles),
    }


def test_an_uneven_epoch_is_one_program_and_every_record_counts_once(answers: Answers) -> None:
    assert sorted(value for answer in answers for value in answer["padded"]["real"]) == list(range(22))
    assert {len(answer["padded"]["shapes"]) for answer in answers} == {1}
    assert {answer["padded"]["batches"] for answer in answers} == {len(range(0, -(-22 // len(answers)), 4))}
    # Reading values back adds programs, the same for each batch except the masked one.
    assert all(answer["padded"]["after_first"] <= 3 for answer in answers)


@exercise
def bucketed(replica: Replica, directory: Path) -> dict[str, Any]:
    lengths = [1 + index % 16 for index in range(96)]
    batches = BucketBatchSampler(
        lengths, [4, 8, 16], batch_size=4, num_replicas=replica.world_size, rank=replica.ordinal
    )
    data = [torch.full((length,), float(length)) for length in lengths]
    loader: DataLoader[Any] = DataLoader(data, batch_sampler=batches, collate_fn=BucketCollate([4, 8, 16]))  # type: ignore[arg-type]
    module = replica.setup(_seeded(lambda: nn.Embedding(17, 2)))
    shapes, before = set(), _compiles(replica)
    with torch.no_grad():
        for batch in replica.loader(loader):
            values = batch if isinstance(batch, torch.Tensor) else batch[0]
            shapes.add(tuple(values.shape))
            _ = module(values.long()).sum()
    replica.sync(wait=True)
    return {"shapes": shapes, "compiles": _compiles(replica) - before}


def test_length_buckets_give_batches_of_their_lengths(answers: Answers) -> None:
    for answer in answers:
        assert answer["bucketed"]["shapes"] == {(4, 4), (4, 8), (4, 16)}


@pytest.mark.torch_xla("one program for each step")
def test_length_buckets_compile_one_program_for_each_bucket(answers: Answers) -> None:
    for answer in answers:
        assert 0 < answer["bucketed"]["compiles"] <= 3


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


@exercise
def clipped(replica: Replica, directory: Path) -> list[list[float]]:
    results = []
    for limits in ({}, {"clip_norm": 1.0}, {"clip_value": 0.5}):
        weight = nn.Parameter(torch.zeros(2, device=replica.device))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        # Each replica has another gradient; their mean is known.
        (weight[0] * 6.0 * (replica.ordinal + 1)).backward()
        replica.step(optimizer, **limits)  # type: ignore[arg-type]
        results.append(weight.tolist())
    return results


def test_clipping_applies_to_the_mean_gradient(answers: Answers) -> None:
    mean = 6.0 * (len(answers) + 1) / 2
    for answer in answers:
        plain, by_norm, by_value = answer["clipped"]
        assert plain == [-mean, 0.0]
        assert by_norm == [pytest.approx(-1.0, abs=1e-5), 0.0]
        assert by_value == [-0.5, 0.0]


@exercise
def own_weights(replica: Replica, directory: Path) -> list[list[float]]:
    module = nn.Linear(1, 2)
    nn.init.constant_(module.weight, float(replica.ordinal + 1))
    nn.init.constant_(module.bias, float(replica.ordinal))
    replica.setup(module)
    return [parameter.detach().flatten().tolist() for parameter in module.parameters()]


def test_replicas_start_with_the_parameters_of_ordinal_0(answers: Answers) -> None:
    assert [answer["own_weights"] for answer in answers] == [[[1.0, 1.0], [0.0, 0.0]]] * len(answers)


@exercise
def drawn(replica: Replica, directory: Path) -> list[Any]:
    draws = []
    for seed in (5, 5, 6):
        replica.seed_everything(seed)
        on_device = torch.rand(3, device=replica.device).tolist()
        draws.append((on_device, random.random(), torch.rand(1).item(), float(np.random.random())))  # noqa: NPY002
    return draws


def test_a_seed_determines_the_devices_numbers_which_differ_by_replica(answers: Answers) -> None:
    for answer in answers:
        first, again, other = answer["drawn"]
        assert first[0] == again[0]
        assert first[0] != other[0]
    assert len({tuple(answer["drawn"][0][0]) for answer in answers}) == len(answers)


def test_a_seed_determines_the_numbers_of_python_torch_and_numpy(answers: Answers) -> None:
    if len(answers) > 1:
        pytest.skip("replicas that are threads share them")
    first, again, other = answers[0]["drawn"]
    assert first == again
    assert all(draw != another for draw, another in zip(first, other, strict=True))


@exercise
def saved_by_one(replica: Replica, directory: Path) -> dict[str, Any]:
    module = _seeded(lambda: nn.Linear(3, 3))
    replica.setup(module)
    tied = nn.ModuleList([module, module])
    weight = module.get_parameter("weight").detach()
    path = directory / "one.safetensors"
    if replica.ordinal == replica.world_size - 1:
        save({"module": tied.state_dict(), "view": weight.t(), "note": [1, "two"]}, path)
    replica.barrier()
    state = load(path)
    return {
        "weight": torch.equal(state["module"]["0.weight"], weight.cpu()),
        "view": torch.equal(state["view"], weight.cpu().t()),
        "note": state["note"],
    }


def test_one_replica_can_save_while_the_others_continue(answers: Answers) -> None:
    assert [answer["saved_by_one"] for answer in answers] == [
        {"weight": True, "view": True, "note": [1, "two"]}
    ] * len(answers)


@exercise
def saved_before_the_collective_ran(replica: Replica, directory: Path) -> float:
    # Reading the sum waits for all replicas, and the others have not sent their part to their devices yet.
    total = replica.all_reduce(torch.ones(1, device=replica.device), "sum")
    path = directory / "pending.safetensors"
    if replica.is_first:
        save({"total": total}, path)
    replica.barrier()
    return float(load(path)["total"])


def test_saving_the_result_of_a_pending_collective_does_not_hang(answers: Answers) -> None:
    assert {answer["saved_before_the_collective_ran"] for answer in answers} == {float(len(answers))}


TENSOR_BYTES = 1 << 26


@exercise
def memory(replica: Replica, directory: Path) -> Any:
    counters = replica.counters()
    assert counters is not None

    def used() -> int | None:
        gc.collect()
        replica.sync(wait=True)
        found = counters.memory()
        assert found is None or 0 <= found.used_bytes <= found.limit_bytes
        return None if found is None else found.used_bytes

    before = used()
    tensor = torch.zeros(TENSOR_BYTES // 4, device=replica.device)
    after = used()
    assert tensor.numel() == TENSOR_BYTES // 4
    return None if before is None or after is None else after - before


def test_a_tensor_raises_the_devices_memory_by_its_size(answers: Answers, runtime: RuntimeUnderTest) -> None:
    for answer in answers:
        if answer["memory"] is None:
            # torch_xla's own CPU client, which has no allocator to ask.
            assert (runtime.name, len(answers)) == ("pjrt", 1)
            continue
        assert abs(answer["memory"] - TENSOR_BYTES) < TENSOR_BYTES / 100
