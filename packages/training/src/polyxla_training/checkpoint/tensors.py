"""The tensors of a checkpoint: their dtypes in the file, their shards, and the memory that several share."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    import torch.distributed as dist

NAMED = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The format's names. Source: ``Dtype`` in safetensors/src/tensor.rs of safetensors 0.8."""
STORED_AS = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}
"""Dtypes that the format has no name for, or one that not all readers know: the same bytes are stored under
another dtype. A complex number becomes two real ones, in an additional last dimension of 2."""
if isinstance(bcomplex32 := getattr(torch, "bcomplex32", None), torch.dtype):
    # A pair of bfloat16, which newer releases of torch have.
    STORED_AS[bcomplex32] = torch.bfloat16
_NAMES = {dtype: name for name, dtype in NAMED.items()}


def stored(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Return the format's dtype and shape for a tensor, or None if it cannot be stored."""
    target = STORED_AS.get(dtype, dtype)
    if target not in _NAMES:
        return None
    return _NAMES[target], (*shape, 2) if dtype.is_complex else shape


def restored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the original of a tensor that `stored` gave another dtype, over the same memory.

    Raises:
        ValueError: `dtype` is not stored as the tensor's dtype.
    """
    if tensor.dtype is not STORED_AS.get(dtype, dtype):
        raise ValueError(f"{dtype} is not stored as {tensor.dtype}")
    # Not torch.view_as_complex, which accepts no pairs of bfloat16.
    return tensor.view(dtype).squeeze(-1) if dtype.is_complex else tensor.view(dtype)


AGREE_TIMEOUT_S = 1800.0
"""Maximum wait for the other replicas' shards, in seconds; a `BackgroundWriter` waits as long for a write."""


def is_divided(tensor: Any) -> bool:
    """Return whether a tensor is divided among replicas. Does not import DTensor, which takes a second."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def map_shard(function: Callable[[torch.Tensor], torch.Tensor], tensor: Any) -> torch.Tensor:
    """Return a divided tensor whose shard in this replica is ``function(shard)``, also on another device."""
    from torch.distributed.tensor import DTensor

    # DTensor's constructor, because DTensor.from_local would move the shard to the device of the mesh.
    divided: torch.Tensor = DTensor(function(tensor._local_tensor), tensor._spec, requires_grad=False)
    return divided


def checkpoint_group() -> dist.ProcessGroup:
    """Return the process group over which replicas agree on a checkpoint; one of its own, for threads.

    A collective of all replicas at the first call, which the thread that trains must make.
    """
    import torch.distributed as dist

    # The group is kept per world: a second launch in this process has another default group.
    return _new_group(dist.distributed_c10d._get_default_group())


@lru_cache(maxsize=1)
def _new_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    import torch.distributed as dist

    # On the host: replicas also agree in a background thread, whose collectives on the device could meet
    # those of the training step in another order on each replica.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=AGREE_TIMEOUT_S))
    return cast("dist.ProcessGroup", group)


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
        for member in group:
            member.node["name"] = name
            offset, shape, stride = _place(member.tensor)
            if (offset, shape, stride) != _place(whole.tensor):
                member.node["view"] = [shape, stride, offset - whole.tensor.storage_offset()]
    return tensors


def _whole(group: list[TensorNode]) -> TensorNode:
    """Return the tensor that contains all others, or the memory from the first to the last as one."""
    places = {_place(member.tensor) for member in group}
    starts, stops = zip(*(_range(member.tensor) for member in group), strict=True)
    start, stop = min(starts), max(stops)
    for member in group:
        if len(places) == 1 or (_range(member.tensor) == (start, stop) and member.tensor.is_contiguous()):
            return member
    first = group[0]
    return TensorNode(first.node, first.name, first.tensor.detach().as_strided((stop - start,), (1,), start))


def _overlapping(nodes: Iterable[TensorNode]) -> Iterator[list[TensorNode]]:
    """Group the tensors whose memory overlaps; the others are groups of one. Keeps the order."""
    storages: dict[Any, list[TensorNode]] = {}
    for node in nodes:
        kind = (node.tensor.dtype, node.tensor.is_conj(), node.tensor.is_neg())
        storages.setdefault((_memory(node.tensor), *kind), []).append(node)
    # Only tensors of one storage and one dtype can be views of each other.
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
    # An XLA tensor shares its storage with its views, but does not report which part of it a view shows. A
    # tensor that does not fill its storage may be such a view, so it is stored by itself.
    if tensor.device.type != "cpu" and tensor.nbytes != storage.nbytes():
        return id(tensor)
    return int(storage._cdata)


def _equals(group: list[TensorNode]) -> Iterator[list[TensorNode]]:
    """Group tensors of one storage on a device by their values: one may be a transposed view of another."""
    while group:
        first = group[0].tensor
        # Equal values in one storage are stored once. Reloading them as one tensor changes no value.
        same = [node for node in group if node.tensor is first or torch.equal(node.tensor, first)]
        yield same
        group = [node for node in group if node not in same]


def _clusters(group: list[TensorNode]) -> Iterator[list[TensorNode]]:
    cluster: list[TensorNode] = []
    end = 0
    for node in sorted(group, key=lambda node: _range(node.tensor)):
        start, stop = _range(node.tensor)
        is_same = bool(cluster) and _place(cluster[-1].tensor) == _place(node.tensor)
        # Tensors without elements overlap nothing, but two at the same place are still tied.
        if cluster and start >= end and not is_same:
            yield cluster
            cluster = []
        cluster.append(node)
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
    free = next(name for name in names if name not in taken)
    taken.add(free)
    return free
