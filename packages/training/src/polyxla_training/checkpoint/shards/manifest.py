"""The manifest of a checkpoint in shards: its pytree, and the place of each part of each tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from polyxla_training.checkpoint import safetensors_header
from polyxla_training.checkpoint.errors import CheckpointError
from polyxla_training.checkpoint.file_reader import header_checksum, opened, read_safetensors
from polyxla_training.checkpoint.file_writer import host_bytes, write_safetensors
from polyxla_training.checkpoint.shards.layout import STATE
from polyxla_training.checkpoint.state_codec import dtype_name, encode_state, read_dtype
from polyxla_training.storage.location import Location

VERSION = 1


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, in a file under the tensor's name.

    Attributes:
        offsets: place of its first element in the tensor, by dimension.
        shape: its shape.
        file: name of the file.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class DividedTensor:
    """A tensor, and the chunks that make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """What `STATE` holds.

    Attributes:
        tree: the state's pytree as JSON; see `state_codec`.
        tensors: by name.
        files: checksum of each other file's header, by name.
    """

    tree: str
    tensors: Mapping[str, DividedTensor]
    files: Mapping[str, str]

    def write(self, directory: Location) -> None:
        """Write the manifest.

        Raises:
            CheckpointError: it cannot be written.
        """
        tensors = {
            name: [dtype_name(one.dtype), one.shape, [(at.offsets, at.shape, at.file) for at in one.chunks]]
            for name, one in self.tensors.items()
        }
        text = json.dumps([VERSION, self.tree, tensors, dict(self.files)], separators=(",", ":")).encode()
        # A tensor, because the metadata of the format has a limit, which thousands of shards could reach.
        manifest = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        write_safetensors(encode_state({"manifest": manifest}), directory / STATE)

    @classmethod
    def read(cls, directory: Location) -> Manifest:
        """Read a manifest.

        Raises:
            CheckpointError: there is none, or it cannot be read.
            DamagedCheckpointError: it is not as it was written.
        """
        path = directory / STATE
        try:
            size_bytes = path.stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{str(directory)!r} is not a checkpoint: {STATE} in it cannot be read: "
                f"{error.strerror or error}",
                where="load",
                fix="Name a checkpoint: a file, or a directory such as step-00000123.shards.",
            ) from error
        with opened(path) as file:
            state = read_safetensors(file, size_bytes, torch.device("cpu"), verify=True)
            try:
                version, tree, tensors, files = json.loads(bytes(host_bytes(state["manifest"])))
                if version != VERSION:
                    raise safetensors_header.DamageError("another version of polyxla wrote it")
                found = {name: _divided_tensor(*fields) for name, fields in tensors.items()}
            except (AttributeError, LookupError, TypeError, UnicodeError, json.JSONDecodeError) as error:
                raise safetensors_header.DamageError(f"it is not a manifest: {error!r}") from error
        return cls(tree, found, files)


def file_checksum(path: Location) -> str:
    """Return the checksum of a file's header, which holds those of its tensors.

    Raises:
        CheckpointError: the file cannot be read.
    """
    with opened(path) as file:
        return header_checksum(file)


def _divided_tensor(dtype: str, shape: list[int], chunks: list[list[object]]) -> DividedTensor:
    return DividedTensor(
        read_dtype(dtype),
        tuple(shape),
        tuple(Chunk(tuple(offsets), tuple(size), str(file)) for offsets, size, file in chunks),  # type: ignore[arg-type]
    )
