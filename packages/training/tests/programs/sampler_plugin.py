"""A plugin that divides loaders as polyxla-sampler does, without its entry point."""

from __future__ import annotations

from typing import Any

from polyxla import hookimpl
from polyxla.plugin import World
from polyxla_sampler.loader import shard


@hookimpl
def polyxla_shard_loader(loader: Any, world: World, seed: int, repeat: bool) -> Any:
    return shard(loader, world.ordinal, world.world_size, seed, repeat)
