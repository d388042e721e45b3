"""Checkpoints in shards: their manifest, reading them in any division, and putting them together in one file.

torch.distributed.checkpoint plans which parts of which file a replica needs. Nothing here is a collective.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from polyxla.plugin import map_tensors
from polyxla_training.checkpoint import safetensors_header
from polyxla_training.checkpoint.atomic import STATE, is_sharded
from polyxla_training.checkpoint.errors import CheckpointError, DamagedCheckpointError
from polyxla_training.checkpoint.state_codec import decode_state, dtype_name, encode_state, read_dtype
from polyxla_training.checkpoint.state_file import (
    header_checksum,
    host_bytes,
    opened,
    read_safetensors,
    read_tensor,
    write_safetensors,
)
from polyxla_training.storage import Location, RemotePath, directories_in

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
    """The content of the file `STATE`.

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
            name: [
                dtype_name(tensor.dtype),
                tensor.shape,
                [(chunk.offsets, chunk.shape, chunk.file) for chunk in tensor.chunks],
            ]
            for name, tensor in self.tensors.items()
        }
        text = json.dumps([VERSION, self.tree, tensors, dict(self.files)], separators=(",", ":")).encode()
        # Stored as a tensor, because the format limits the size of metadata, and the list of thousands of
        # shards could exceed it.
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


class ShardedCheckpoint:
    """A checkpoint's directory, open for reading.

    Args:
        place: the directory, or its URL in an object store.
        verify: compare each tensor that is read with its checksum.

    Raises:
        CheckpointError: there is no checkpoint.
        DamagedCheckpointError: its manifest is damaged.
    """

    def __init__(self, place: Location, *, verify: bool = True) -> None:
        self.place = place
        self._verify = verify
        self._manifest = Manifest.read(place)
        self._metadata = Metadata(
            {name: _metadata(tensor) for name, tensor in self._manifest.tensors.items()}
        )
        self._files = {
            (name, chunk.offsets): chunk.file
            for name, tensor in self._manifest.tensors.items()
            for chunk in tensor.chunks
        }
        self._headers: dict[str, safetensors_header.Header] = {}
        self._unread: dict[int, tuple[str, torch.Tensor]] = {}

    def check(self) -> None:
        """Check that every file is there, of its size and with its header; does not read the tensors.

        Raises:
            DamagedCheckpointError: one is not; the error names it.
        """
        for name in self._manifest.files:
            with self._opened(name):
                pass

    def state(self, *, device: torch.device | None = None, unread: tuple[str, ...] = ()) -> Any:
        """Return the state with whole tensors.

        Args:
            device: device for the tensors; default: the host.
            unread: beginnings of the names of tensors to leave unread: these are on the meta device, and
                `name_of` knows them.

        Raises:
            DamagedCheckpointError: a file is missing, or not as it was written; the error names it.
        """
        found: dict[str, torch.Tensor] = {}

        def tensor(name: str, dtype: torch.dtype) -> torch.Tensor:
            if name not in found:
                found[name] = self._left_out(name) if name.startswith(unread) else self.whole(name)
                if device is not None and not found[name].is_meta:
                    found[name] = found[name].to(device)
            return found[name]

        return decode_state(self._manifest.tree, tensor)

    def _left_out(self, name: str) -> torch.Tensor:
        divided = self._manifest.tensors[name]
        tensor = torch.empty(divided.shape, dtype=divided.dtype, device="meta")
        # The tensor is kept with its name: once it were freed, another could have its id.
        self._unread[id(tensor)] = (name, tensor)
        return tensor

    def name_of(self, unread: torch.Tensor) -> str | None:
        """Return the name of a tensor that `state` has left unread; None if it has not."""
        return self._unread.get(id(unread), (None, None))[0]

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor on the host.

        Raises:
            DamagedCheckpointError: as for `state`.
        """
        divided = self._manifest.tensors[name]
        tensor = torch.empty(divided.shape, dtype=divided.dtype)
        self.read({name: tensor})
        return tensor

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors; of a divided one this replica's shard. One chunk at a time is in host memory.

        Args:
            targets: by the names in the checkpoint, of the shapes there, on any device.

        Raises:
            DamagedCheckpointError: as for `state`.
        """
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(targets), self._metadata, is_coordinator=True)
        plan = planner.finish_plan(planner.create_local_plan())
        requests: dict[str, dict[str, list[ReadItem]]] = {}
        for item in plan.items:
            name, offset = item.storage_index.fqn, item.storage_index.offset
            assert offset is not None
            requests.setdefault(self._files[name, tuple(offset)], {}).setdefault(name, []).append(item)
        # By file, then by tensor: each file is opened once, and each chunk read once for all parts that need
        # it.
        for file_name, by_tensor in requests.items():
            with self._opened(file_name) as file:
                for name, items in by_tensor.items():
                    self._fill(file, file_name, name, items, planner)

    def _fill(
        self, file: BufferedReader, file_name: str, name: str, items: list[ReadItem], planner: LoadPlanner
    ) -> None:
        dtype, header = self._manifest.tensors[name].dtype, self._headers[file_name]
        # The whole chunk, although a new division may need a part of it: its checksum covers all of it.
        chunk = read_tensor(file, header, name, dtype, self._verify)
        for item in items:
            part = chunk
            for dimension, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dimension, start, size)
            # A part of this replica's shard, on its device; the copy moves the values there.
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)

    @contextmanager
    def _opened(self, name: str) -> Iterator[BufferedReader]:
        """Open one of the files; its header is compared with the manifest at the first time."""
        path = self.place / name
        try:
            size_bytes = path.stat().st_size
        except FileNotFoundError as error:
            raise DamagedCheckpointError(
                f"{str(self.place)!r} is damaged: {name} is missing",
                where="load",
                fix="Load another checkpoint.",
            ) from error
        with opened(path) as file:
            # A file of an earlier checkpoint of the same step would have valid checksums of its own; the
            # manifest knows the header that belongs to this one.
            if name not in self._headers:
                self._check_header(name, header_checksum(file))
                file.seek(0)
                self._headers[name] = safetensors_header.read(file, size_bytes)
            yield file

    def _check_header(self, name: str, found: str) -> None:
        if found != self._manifest.files[name]:
            raise safetensors_header.DamageError("it is not the file that was written with this checkpoint")


def _metadata(tensor: Any) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)) for chunk in tensor.chunks
    ]
    return TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks)


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
    # Checked before the file is begun: writing it may take long.
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
    # Never overwritten: the command may be repeated by mistake, and takes long.
    if _exists(target):
        raise CheckpointError(
            f"{str(target)!r} exists already", where="-o", fix="Delete it, or name another file with -o FILE."
        )
    names: dict[int, str] = {}

    def stand_in(unread: torch.Tensor) -> torch.Tensor:
        # One element, expanded: the encoder needs the shape and the dtype, and this takes no memory.
        tensor = torch.empty((), dtype=unread.dtype).expand(unread.shape)
        name = checkpoint.name_of(unread)
        assert name is not None
        names[id(tensor)] = name
        return tensor

    encoded = encode_state(map_tensors(stand_in, state[key]))
    write_safetensors(encoded, target, read=lambda tensor: checkpoint.whole(names[id(tensor)]))
    return Consolidated(str(target), len(encoded.tensors), target.stat().st_size)


def _check_sharded(place: Location) -> None:
    try:
        newest = max((directory.name for directory in directories_in(place, "step-")), default=None)
    except NotADirectoryError:
        newest = None
    # The likely mistake is to name the directory of all checkpoints.
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
    # CheckpointFolder does not take this name for a checkpoint, and so neither counts nor deletes the file.
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
