"""The hooks of polyxla-sampler."""

from __future__ import annotations

from typing import Any

import pluggy

# Made from the project's name, so that this package depends on pluggy and not on polyxla.
hookimpl = pluggy.HookimplMarker("polyxla")


@hookimpl
def polyxla_shard_loader(loader: Any, world: Any, seed: int, repeat: bool) -> Any | None:
    """Divide a DataLoader's records among the replicas of `world`; None if it is not a DataLoader."""
    from polyxla_sampler.loader import shard

    return shard(loader, world.ordinal, world.world_size, seed, repeat)
