"""Recognise a sampler or a dataset that divides its records among the replicas itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

_WORLDS = ("_distributed", "_parallel_rank_world", "_rank_world", "distributed_env")
"""Attributes that hold an object with the numbers below.
Source: ``split_dataset_by_node`` of datasets 5.2, ``StreamingDataset`` of mosaicml-streaming 0.13 and 0.7,
and that of litdata 0.2.
"""
_NUMBERS = (
    ("num_replicas", "rank"),
    ("world_size", "rank"),
    ("_world_size", "_rank"),
    ("num_processes", "process_index"),
    ("num_ranks", "rank"),
    ("world_size", "global_rank"),
)
"""Attributes with the number of parts and the number of this one.
Source: torch's DistributedSampler, samplers of mmengine and of detectron2, Accelerate, and those above.
"""
_DEPTH = 4
"""How many datasets may stand around the one that divides."""


@dataclass(frozen=True)
class Divided:
    """Something that divides records.

    Attributes:
        name: what does it.
        parts: among how many replicas.
    """

    name: str
    parts: int

    def note(self, replicas: int) -> str:
        """Return the sentence to print, for a job of so many replicas."""
        note = f"{self.name} divides the records among {self.parts} replica(s) itself"
        return note if self.parts == replicas else f"{note}, although there are {replicas}"


def divided_by(source: Any, replicas: int) -> Divided | None:
    """Return what divides the records of a sampler or a dataset, itself or one inside it; or None.

    What was made for one replica divides nothing, where there are several.
    """
    for one in _within(source, _DEPTH):
        parts = _webdataset_parts() if _splits_by_node(one) else _parts(one)
        if parts is not None and (parts > 1 or replicas == 1):
            return Divided(getattr(one, "__name__", type(one).__name__), parts)
    return None


def _parts(one: Any) -> int | None:
    """Return among how many replicas an object with its attributes divides."""
    for holder in (one, *(getattr(one, name, None) for name in _WORLDS)):
        for count, rank in _NUMBERS:
            found = getattr(holder, count, None), getattr(holder, rank, None)
            if all(type(number) is int for number in found):
                return found[0]
    return None


def _splits_by_node(one: Any) -> bool:
    module = getattr(one, "__module__", None) or ""
    return getattr(one, "__name__", "") == "split_by_node" and module.partition(".")[0] == "webdataset"


def _webdataset_parts() -> int:
    """Return among how many replicas WebDataset divides: by the environment, or by torch.distributed."""
    parts: int = sys.modules["webdataset.utils"].pytorch_worker_info()[1]
    return parts


def _within(source: Any, depth: int) -> Iterator[Any]:
    """Yield an object, and the datasets and the stages of a pipeline that it holds."""
    yield source
    if depth == 0:
        return
    for value in vars(source).values() if hasattr(source, "__dict__") else ():
        for part in value if isinstance(value, list | tuple) else [value]:
            if isinstance(part, IterableDataset):
                yield from _within(part, depth - 1)
            elif _splits_by_node(part):
                yield part
