"""Batches on the host are trimmed, padded, masked and checked."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyxla import UsageError
from polyxla.replica.loader import HostBatches, ReadOptions, check, count_records


class _Pair(NamedTuple):
    one: Any
    two: Any


@dataclasses.dataclass(frozen=True)
class _Graph:
    nodes: torch.Tensor
    name: str


def _uploaded(
    batches: list[Any], *, pad: bool, even: bool = False, repeats: int = 0, size: int | None = None
) -> list[tuple[list[torch.Tensor], int, bool]]:
    marks = [number >= len(batches) - repeats for number in range(len(batches))]
    host = HostBatches(zip(batches, marks, strict=True), size, ReadOptions(pad, even, {}))
    sent = []
    for number, tensors in host:
        pending = host.take(number)
        sent.append((tensors, pending.records, pending.has_mask))
    return sent


def _records(count: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + count, dtype=torch.float32)


def test_a_batch_without_padding_is_uploaded_unchanged() -> None:
    batch = {"x": _records(4), "y": [_records(4), None]}
    [(tensors, records, has_mask)] = _uploaded([batch], pad=False)
    assert tensors[0] is batch["x"]
    assert (len(tensors), records, has_mask) == (2, 4, False)


def test_a_short_batch_is_padded_with_its_last_record_and_masked() -> None:
    scalar = torch.tensor(7.0)
    [_, (tensors, records, has_mask)] = _uploaded([(_records(4), scalar), (_records(2, 4), scalar)], pad=True)
    padded, unpadded, mask = tensors
    assert padded.tolist() == [4, 5, 5, 5]
    assert unpadded is scalar, "it has no records"
    assert mask.tolist() == [True, True, False, False]
    assert (records, has_mask) == (2, True)


def test_the_loaders_batch_size_counts_though_the_first_batch_is_short() -> None:
    [(tensors, records, _)] = _uploaded([_records(2)], pad=True, size=5)
    assert tensors[0].tolist() == [0, 1, 1, 1, 1]
    assert records == 2


def test_repeated_records_are_left_out_of_an_evaluation() -> None:
    sent = _uploaded([_records(3), _records(1, 3), _records(1)], pad=False, repeats=1)
    assert [tensors[0].tolist() for tensors, _, _ in sent] == [[0, 1, 2], [3]]


def test_a_batch_of_repeats_counts_no_record_if_all_replicas_get_equally_many() -> None:
    sent = _uploaded([_records(3), _records(1)], pad=False, even=True, repeats=1)
    assert [(tensors[0].tolist(), records) for tensors, records, _ in sent] == [([0, 1, 2], 3), ([0], 0)]


def test_padding_gives_every_replica_the_same_number_of_batches() -> None:
    sent = _uploaded([_records(3), _records(1, 3), _records(1)], pad=True, repeats=1)
    masks = [tensors[1].tolist() if has_mask else None for tensors, _, has_mask in sent]
    assert masks == [None, [True, False, False], [False, False, False]]
    assert [records for _, records, _ in sent] == [3, 1, 0]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 6), st.booleans())
def test_every_real_record_is_given_once_and_in_order(sizes: list[int], repeats: int, pad: bool) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    batches = [_records(size, start) for size, start in zip(sizes, starts, strict=True)]
    sent = _uploaded(batches, pad=pad, repeats=repeats, size=max(sizes))
    real = [
        value
        for tensors, _, has_mask in sent
        for value in (tensors[0][tensors[1]] if has_mask else tensors[0]).tolist()
    ]
    assert real == list(range(sum(sizes[: max(len(sizes) - repeats, 0)])))
    assert sum(records for _, records, _ in sent) == len(real)
    if pad:
        assert {len(tensors[0]) for tensors, _, _ in sent} == {max(sizes)}


@pytest.mark.parametrize(
    "batch",
    [
        _Pair(torch.ones(3), None),
        MappingProxyType({"x": torch.ones(3), "id": "a"}),
        _Graph(torch.ones(3), "g"),
        {"deep": [({"x": torch.ones(3)},)], "word": "b"},
        [None, 5, torch.ones(3, 2)],
    ],
    ids=["named-tuple", "mappingproxy", "dataclass", "nested", "list"],
)
def test_every_container_is_searched_for_tensors(batch: Any) -> None:
    assert count_records(batch) == 3
    check(batch)


def test_a_batch_without_tensors_has_no_records() -> None:
    assert count_records({"x": None, "y": ["a"]}) is None
    assert _uploaded([{"x": "a"}, {"x": "b"}], pad=False, repeats=1) == [([], 0, False)]
    with pytest.raises(UsageError, match="a batch without tensors cannot be padded"):
        _uploaded([{"x": "a"}], pad=True)


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        ({"x": [torch.ones(1), SimpleNamespace(y=torch.ones(1))]}, "batch['x'][1] is a SimpleNamespace"),
        (_Pair({torch.ones(1)}, 1), "batch.one is a set"),
    ],
    ids=["object", "set"],
)
def test_tensors_that_would_stay_on_the_host_are_named(batch: Any, path: str) -> None:
    with pytest.raises(UsageError) as caught:
        _uploaded([batch], pad=False)
    assert str(caught.value) == (
        f"{path} that holds tensors, which would stay on the host (from the loader's batch). "
        "Return lists, tuples, dicts or dataclasses of tensors from collate_fn."
    )
