"""A plugin: each replica reads every world_size-th batch. `divided` lists the ordinals that divided one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polyxla import hookimpl
from polyxla.plugin import World

divided: list[int] = []


class EveryNth:
    def __init__(self, loader: Any, world: World) -> None:
        self.loader, self.world = loader, world

    def __len__(self) -> int:
        return len(self.loader) // self.world.world_size

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.loader):
            if index % self.world.world_size == self.world.ordinal:
                yield batch


@hookimpl
def polyxla_shard_loader(loader: Any, world: World) -> EveryNth:
    divided.append(world.ordinal)
    return EveryNth(loader, world)
