"""Tensors that share memory: written once, and sharing it again when they are read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(eq=False)
class Found:
    """A tensor of the nest.

    Attributes:
        node: what stands for it in the encoded nest; `shared` completes it.
        name: where it stands in the nest, with dots.
        tensor: the tensor itself, on any device.
    """

    node: dict[str, Any]
    name: str
    tensor: torch.Tensor


@dataclass
class Part:
    """A tensor to be written: a tensor of the nest, or the memory that several of them share."""

    name: str
    tensor: torch.Tensor


def shared(found: Iterable[Found]) -> list[Part]:
    """Return what is to be written for these tensors, and say in their nodes where each will be.

    Tensors of the same place in memory (tied weights) become one part. So do tensors of one dtype whose
    ranges of memory overlap (a buffer and its slices): the part is the one that holds all others, or that
    range if none does, and each node says which view of it is meant.
    """
    taken: set[str] = {"__metadata__"}
    parts = []
    for group in _overlapping(found):
        whole = _whole(group)
        name = _free_name(whole.name, taken)
        parts.append(Part(name, whole.tensor))
        for one in group:
            one.node["name"] = name
            offset, shape, stride = _place(one.tensor)
            if (offset, shape, stride) != _place(whole.tensor):
                one.node["view"] = [shape, stride, offset - whole.tensor.storage_offset()]
    return parts


def _whole(group: list[Found]) -> Found:
    """Return the one that holds all others, or the memory from the first to the last, under a name."""
    places = {_place(one.tensor) for one in group}
    starts, stops = zip(*(_range(one.tensor) for one in group), strict=True)
    start, stop = min(starts), max(stops)
    for one in group:
        if len(places) == 1 or (_range(one.tensor) == (start, stop) and one.tensor.is_contiguous()):
            return one
    first = group[0]
    return Found(first.node, first.name, first.tensor.detach().as_strided((stop - start,), (1,), start))


def _overlapping(found: Iterable[Found]) -> Iterator[list[Found]]:
    """Group the tensors whose memory overlaps, the others alone, in the nest's order."""
    storages: dict[Any, list[Found]] = {}
    for one in found:
        kind = (one.tensor.dtype, one.tensor.is_conj(), one.tensor.is_neg())
        storages.setdefault((_memory(one.tensor), *kind), []).append(one)
    for group in storages.values():
        if len(group) == 1:
            yield group
        else:
            yield from _clusters(group) if group[0].tensor.device.type == "cpu" else _equals(group)


def _memory(tensor: torch.Tensor) -> int:
    """Return what tells the memory of tensors that live: their storage's address, for want of a better."""
    storage = tensor.untyped_storage()
    # An XLA tensor has its storage in common with its views, but does not say which view it is.
    if tensor.device.type != "cpu" and tensor.nbytes != storage.nbytes():
        return id(tensor)
    return int(storage._cdata)


def _equals(group: list[Found]) -> Iterator[list[Found]]:
    """Group tensors of one storage on a device by what is in them: a transposed view may be among them."""
    while group:
        first = group[0].tensor
        same = [one for one in group if one.tensor is first or torch.equal(one.tensor, first)]
        yield same
        group = [one for one in group if one not in same]


def _clusters(group: list[Found]) -> Iterator[list[Found]]:
    cluster: list[Found] = []
    end = 0
    for one in sorted(group, key=lambda one: _range(one.tensor)):
        start, stop = _range(one.tensor)
        is_same = bool(cluster) and _place(cluster[-1].tensor) == _place(one.tensor)
        if cluster and start >= end and not is_same:
            yield cluster
            cluster = []
        cluster.append(one)
        end = max(end, stop)
    yield cluster


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first element in the storage that the tensor reaches, and the one after its last."""
    start = int(tensor.storage_offset())
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + last + 1


def _free_name(name: str, taken: set[str]) -> str:
    # Text that is no Unicode would keep other readers from the file.
    name = name.encode(errors="replace").decode()
    names = itertools.chain([name], (f"{name}~{count}" for count in itertools.count(2)))
    free = next(one for one in names if one not in taken)
    taken.add(free)
    return free
