"""Tensors that are divided among replicas, torch's DTensors: each replica holds one shard."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    import torch.distributed as dist

AGREE_TIMEOUT_S = 1800.0
"""Maximum wait for the other replicas' shards, in seconds; a `BackgroundWriter` waits as long for a write."""


def is_divided(tensor: Any) -> bool:
    """Return whether a tensor is divided among replicas. Does not import DTensor, which takes a second."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def map_shard(function: Callable[[torch.Tensor], torch.Tensor], tensor: Any) -> torch.Tensor:
    """Return a divided tensor whose shard in this replica is ``function(shard)``, also on another device."""
    from torch.distributed.tensor import DTensor

    # The constructor, because DTensor.from_local moves the shard to the device of the mesh.
    divided: torch.Tensor = DTensor(function(tensor._local_tensor), tensor._spec, requires_grad=False)
    return divided


def checkpoint_group() -> dist.ProcessGroup:
    """Return the process group over which replicas agree on a checkpoint; one of its own, for threads.

    A collective of all replicas at the first call, which the thread that trains must make.
    """
    import torch.distributed as dist

    return _new_group(dist.distributed_c10d._get_default_group())


@lru_cache(maxsize=1)
def _new_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    import torch.distributed as dist

    # On the host: in a thread, the device's collectives could meet those of the step.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=AGREE_TIMEOUT_S))
    return cast("dist.ProcessGroup", group)
