"""How a checkpoint in shards lies in its directory. Imports no torch."""

from __future__ import annotations

from polyxla_training.storage.location import Location
from polyxla_training.storage.remote_path import RemotePath

STATE = "state.safetensors"
"""File of the manifest. It is written last: a directory without it is not a checkpoint."""
SHARD = "shard-"
"""Beginning of the names of the other files, each of which has the shards of one replica."""


def is_sharded(place: Location) -> bool:
    """Return whether a checkpoint is a directory, not a file."""
    if not isinstance(place, RemotePath):
        return place.is_dir()
    # An object store has no directories of its own.
    try:
        (place / STATE).stat()
    except OSError:
        return False
    return True
