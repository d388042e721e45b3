"""Tensors that share memory: they are stored once, and share memory again when they are loaded."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from polyxla_training.checkpoint.divided_tensor import is_divided


@dataclass(eq=False)
class TensorNode:
    """A tensor of a state.

    Attributes:
        node: its object in the encoded state; `stored_tensors` completes it.
        name: its path in the state, with dots.
        tensor: the tensor, on any device.
    """

    node: dict[str, Any]
    name: str
    tensor: torch.Tensor


@dataclass
class StoredTensor:
    """A tensor of the file: a tensor of the state, or the memory that several of them share."""

    name: str
    tensor: torch.Tensor


def stored_tensors(nodes: Iterable[TensorNode]) -> list[StoredTensor]:
    """Return the tensors to store for these nodes, and complete the nodes with their names and views.

    Tensors at the same place in memory (tied weights) are stored as one. So are tensors of one dtype whose
    ranges of memory overlap (a buffer and its slices): the one that contains all others is stored, or the
    whole range if there is none, and each node describes its view of it.
    """
    taken: set[str] = {"__metadata__"}
    tensors = []
    for group in _overlapping(nodes):
        whole = _whole(group)
        name = _free_name(whole.name, taken)
        tensors.append(StoredTensor(name, whole.tensor))
        for one in group:
            one.node["name"] = name
            offset, shape, stride = _place(one.tensor)
            if (offset, shape, stride) != _place(whole.tensor):
                one.node["view"] = [shape, stride, offset - whole.tensor.storage_offset()]
    return tensors


def _whole(group: list[TensorNode]) -> TensorNode:
    """Return the tensor that contains all others, or the memory from the first to the last as one."""
    places = {_place(one.tensor) for one in group}
    starts, stops = zip(*(_range(one.tensor) for one in group), strict=True)
    start, stop = min(starts), max(stops)
    for one in group:
        if len(places) == 1 or (_range(one.tensor) == (start, stop) and one.tensor.is_contiguous()):
            return one
    first = group[0]
    return TensorNode(first.node, first.name, first.tensor.detach().as_strided((stop - start,), (1,), start))


def _overlapping(nodes: Iterable[TensorNode]) -> Iterator[list[TensorNode]]:
    """Group the tensors whose memory overlaps; the others are groups of one. Keeps the order."""
    storages: dict[Any, list[TensorNode]] = {}
    for one in nodes:
        kind = (one.tensor.dtype, one.tensor.is_conj(), one.tensor.is_neg())
        storages.setdefault((_memory(one.tensor), *kind), []).append(one)
    for group in storages.values():
        if len(group) == 1:
            yield group
        else:
            yield from _clusters(group) if group[0].tensor.device.type == "cpu" else _equals(group)


def _memory(tensor: torch.Tensor) -> int:
    """Return an id of the tensor's memory, valid while the tensor lives: the address of its storage."""
    if is_divided(tensor):
        return id(tensor)
    storage = tensor.untyped_storage()
    # An XLA tensor shares the storage with its views, but does not report which view it is.
    if tensor.device.type != "cpu" and tensor.nbytes != storage.nbytes():
        return id(tensor)
    return int(storage._cdata)


def _equals(group: list[TensorNode]) -> Iterator[list[TensorNode]]:
    """Group tensors of one storage on a device by their values: one may be a transposed view of another."""
    while group:
        first = group[0].tensor
        same = [one for one in group if one.tensor is first or torch.equal(one.tensor, first)]
        yield same
        group = [one for one in group if one not in same]


def _clusters(group: list[TensorNode]) -> Iterator[list[TensorNode]]:
    cluster: list[TensorNode] = []
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
    """Return the tensor's first element in the storage, and the one after its last."""
    start = int(tensor.storage_offset())
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + last + 1


def _free_name(name: str, taken: set[str]) -> str:
    # Text that is not valid Unicode would make the file unreadable for others.
    name = name.encode(errors="replace").decode()
    names = itertools.chain([name], (f"{name}~{count}" for count in itertools.count(2)))
    free = next(one for one in names if one not in taken)
    taken.add(free)
    return free
