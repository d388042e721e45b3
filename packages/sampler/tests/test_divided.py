"""Samplers and datasets that divide their records themselves are recognised, and not divided again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from polyxla_sampler.loader import Divided, divided_by, shard


class Stream(IterableDataset[int]):
    """Sixteen numbers, of which it gives every `parts`-th; its attributes say so."""

    def __init__(self, parts: int, part: int, **attributes: Any) -> None:
        self.parts, self.part = parts, part
        self.__dict__.update(attributes)

    def __iter__(self) -> Iterator[int]:
        return islice(iter(range(16)), self.part, None, self.parts)


class Around(IterableDataset[int]):
    """A program's own dataset around another."""

    def __init__(self, inner: IterableDataset[int]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)


def numbers(**values: int) -> SimpleNamespace:
    return SimpleNamespace(**values)


def read(dataset: IterableDataset[int], index: int) -> tuple[list[int], str]:
    mine = shard(DataLoader(dataset, batch_size=2), index, 2)
    assert mine is not None
    return [int(record) for batch in mine for record in batch], mine.note


KNOWN: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "own": lambda part, parts: {"num_replicas": parts, "rank": part},
    "mmengine": lambda part, parts: {"world_size": parts, "rank": part},
    "detectron2": lambda part, parts: {"_world_size": parts, "_rank": part},
    "accelerate": lambda part, parts: {"num_processes": parts, "process_index": part},
    "datasets": lambda part, parts: {"_distributed": numbers(world_size=parts, rank=part)},
    "mosaicml": lambda part, parts: {"_parallel_rank_world": numbers(num_ranks=parts, rank=part)},
    "litdata": lambda part, parts: {"distributed_env": numbers(world_size=parts, global_rank=part)},
}


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("around", [False, True], ids=["itself", "inside another"])
def test_a_stream_that_divides_itself_is_read_whole(known: str, around: bool) -> None:
    streams: list[IterableDataset[int]] = [Stream(2, part, **KNOWN[known](part, 2)) for part in range(2)]
    found, notes = zip(*(read(Around(s) if around else s, i) for i, s in enumerate(streams)), strict=True)
    assert found == (list(range(0, 16, 2)), list(range(1, 16, 2)))
    assert set(notes) == {"Stream divides the records among 2 replica(s) itself"}


@pytest.mark.parametrize("known", KNOWN)
def test_a_stream_for_one_replica_is_divided_among_several(known: str) -> None:
    found = [read(Stream(1, 0, **KNOWN[known](0, 1)), index)[0] for index in range(2)]
    assert found == [list(range(0, 16, 2)), list(range(1, 16, 2))]


def test_a_stream_without_numbers_is_divided() -> None:
    assert divided_by(Stream(1, 0), 2) is None
    assert divided_by(Around(Stream(1, 0, world_size="two", rank=True)), 2) is None


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "2"}], ids=["alone", "of two"])
def test_webdatasets_split_by_node_counts_where_it_divides(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    webdataset = pytest.importorskip("webdataset")
    found = []
    for index in range(2):
        for name, value in (environ and {**environ, "RANK": str(index)}).items():
            monkeypatch.setenv(name, value)
        stages = [webdataset.SimpleShardList([f"{n}" for n in range(8)]), webdataset.split_by_node]
        pipeline = webdataset.DataPipeline(*stages, webdataset.map(lambda shard: int(shard["url"])))
        records, note = read(pipeline, index)
        found.append(records)
        assert note.startswith("split_by_node divides" if environ else "each of 2 replicas gets")
    assert sorted(chain(*found)) == list(range(8)), "no record is left out, none is read twice"


def test_the_line_says_that_the_numbers_differ() -> None:
    assert Divided("Stream", 3).note(2) == (
        "Stream divides the records among 3 replica(s) itself, although there are 2"
    )
