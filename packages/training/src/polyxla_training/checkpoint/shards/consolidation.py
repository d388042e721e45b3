"""Putting a part of a checkpoint in shards together, as one safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from polyxla.plugin import map_tensors
from polyxla_training.checkpoint.errors import CheckpointError
from polyxla_training.checkpoint.file_writer import write_safetensors
from polyxla_training.checkpoint.shards.layout import is_sharded
from polyxla_training.checkpoint.shards.reader import ShardedCheckpoint
from polyxla_training.checkpoint.state_codec import encode_state
from polyxla_training.storage.location import Location, directories_in
from polyxla_training.storage.remote_path import RemotePath


@dataclass(frozen=True)
class Consolidated:
    """The file that was written.

    Attributes:
        path: its place.
        tensors: number of tensors in it.
        size_bytes: its size.
    """

    path: str
    tensors: int
    size_bytes: int


def consolidate(place: Location, out: Location | None = None, *, key: str = "module") -> Consolidated:
    """Write the tensors under one key of a checkpoint to one file. One tensor at a time is in memory.

    Args:
        place: the checkpoint's directory, or its URL in an object store.
        out: the file; default: beside the directory, such as ``step-00000123-module.safetensors``.
        key: ``module`` of a Trainer's checkpoint, or another key of the state that was saved.

    Raises:
        CheckpointError: `place` is not a checkpoint in shards, has no such key, or the file exists.
        DamagedCheckpointError: a shard is missing, or not as it was written; nothing was written.
    """
    _check_sharded(place)
    checkpoint = ShardedCheckpoint(place)
    # Before a file is begun, which may take long.
    checkpoint.check()
    state = checkpoint.state(unread=("",))
    if not isinstance(state, Mapping) or key not in state:
        keys = ", ".join(map(str, state)) if isinstance(state, Mapping) else "it is not a dict"
        raise CheckpointError(
            f"the checkpoint {str(place)!r} has no {key!r}",
            where="--key",
            fix=f"Name one of its keys: {keys}.",
        )
    target = _beside(place, key) if out is None else out
    if _exists(target):
        raise CheckpointError(
            f"{str(target)!r} exists already", where="-o", fix="Delete it, or name another file with -o FILE."
        )
    names: dict[int, str] = {}

    def stand_in(unread: torch.Tensor) -> torch.Tensor:
        # One element that stands for all: its shape and dtype are encoded, and it needs no memory.
        tensor = torch.empty((), dtype=unread.dtype).expand(unread.shape)
        name = checkpoint.name_of(unread)
        assert name is not None
        names[id(tensor)] = name
        return tensor

    encoded = encode_state(map_tensors(stand_in, state[key]))
    write_safetensors(encoded, target, read=lambda tensor: checkpoint.whole(names[id(tensor)]))
    return Consolidated(str(target), len(encoded.tensors), target.stat().st_size)


def _check_sharded(place: Location) -> None:
    newest = max((one.name for one in directories_in(place, "step-")), default=None)
    if is_sharded(place) and newest is None:
        return
    what = "a directory of checkpoints" if newest else "not a checkpoint in shards"
    raise CheckpointError(
        f"{str(place)!r} is {what}",
        where="polyxla consolidate",
        fix=f"Name {place / newest}."
        if newest
        else "Name a directory such as run/checkpoints/step-00000123.shards.",
    )


def _beside(place: Location, key: str) -> Location:
    # A name that CheckpointFolder does not take for a checkpoint.
    name = f"{place.name.removesuffix('.shards')}-{key}.safetensors"
    if isinstance(place, RemotePath):
        return RemotePath(place.url.rpartition("/")[0]) / name
    return Path(place).resolve().parent / name


def _exists(path: Location) -> bool:
    try:
        path.stat()
    except OSError:
        return False
    return True
