"""Samplers that divide records among replicas and resume in the middle of an epoch.

Importing this package does not import torch: each name is imported on first use.
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
    from polyxla_sampler.sampler import RoundRobinSampler as RoundRobinSampler
    from polyxla_sampler.sampler import ShardedSampler as ShardedSampler
    from polyxla_sampler.sampler import UnrepeatedSampler as UnrepeatedSampler

__all__ = [
    "BucketBatchSampler",
    "BucketCollate",
    "Permutation",
    "RoundRobinSampler",
    "ShardedIterable",
    "ShardedLoader",
    "ShardedSampler",
    "UnrepeatedSampler",
    "shard",
]

_MODULES = {
    "BucketBatchSampler": "buckets",
    "BucketCollate": "buckets",
    "Permutation": "permutation",
    "RoundRobinSampler": "sampler",
    "ShardedIterable": "iterable",
    "ShardedLoader": "loader",
    "ShardedSampler": "sampler",
    "UnrepeatedSampler": "sampler",
    "shard": "loader",
}


def __getattr__(name: str) -> Any:
    # Every command loads the plugin, and this package with it, so torch must not be imported here.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
