"""Which records each replica sees, in which order, and how to go on in the middle of an epoch.

Importing this does not import torch: the names here are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyxla_sampler.buckets import BucketBatchSampler as BucketBatchSampler
    from polyxla_sampler.buckets import BucketCollate as BucketCollate
    from polyxla_sampler.iterable import ShardedIterable as ShardedIterable
    from polyxla_sampler.loader import ShardedLoader as ShardedLoader
    from polyxla_sampler.loader import shard as shard
    from polyxla_sampler.permutation import Permutation as Permutation
    from polyxla_sampler.sampler import ShardedSampler as ShardedSampler
    from polyxla_sampler.sampler import UnrepeatedSampler as UnrepeatedSampler
    from polyxla_sampler.wrapped_sampler import DealtSampler as DealtSampler

__all__ = [
    "BucketBatchSampler",
    "BucketCollate",
    "DealtSampler",
    "Permutation",
    "ShardedIterable",
    "ShardedLoader",
    "ShardedSampler",
    "UnrepeatedSampler",
    "shard",
]

_MODULES = {
    "BucketBatchSampler": "buckets",
    "BucketCollate": "buckets",
    "DealtSampler": "wrapped_sampler",
    "Permutation": "permutation",
    "ShardedIterable": "iterable",
    "ShardedLoader": "loader",
    "ShardedSampler": "sampler",
    "UnrepeatedSampler": "sampler",
    "shard": "loader",
}


def __getattr__(name: str) -> Any:
    # The plugin is loaded by every command, and this with it.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
