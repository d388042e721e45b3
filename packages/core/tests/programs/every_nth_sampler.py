"""A plugin that gives each replica every n-th batch, and records the worlds it was called for."""

import itertools
from collections.abc import Iterable
from typing import Any

from polyxla import hookimpl
from polyxla.plugin import World

worlds: list[World] = []


@hookimpl
def polyxla_shard_loader(loader: Iterable[Any], world: World) -> list[Any]:
    worlds.append(world)
    return list(itertools.islice(loader, world.ordinal, None, world.world_size))
