"""Reading a checkpoint in shards: whole tensors, or each replica's own shards in a new division.

torch.distributed.checkpoint plans which parts of which file a replica needs. Nothing here is a collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
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

from polyxla_training.checkpoint import safetensors_header
from polyxla_training.checkpoint.errors import DamagedCheckpointError
from polyxla_training.checkpoint.file_reader import header_checksum, opened, read_tensor
from polyxla_training.checkpoint.shards.manifest import Manifest
from polyxla_training.checkpoint.state_codec import decode_state
from polyxla_training.storage.location import Location


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
        self._metadata = Metadata({name: _metadata(one) for name, one in self._manifest.tensors.items()})
        self._files = {
            (name, chunk.offsets): chunk.file
            for name, one in self._manifest.tensors.items()
            for chunk in one.chunks
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
        one = self._manifest.tensors[name]
        tensor = torch.empty(one.shape, dtype=one.dtype, device="meta")
        # With the tensor: another could have its id once it is freed.
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
        one = self._manifest.tensors[name]
        tensor = torch.empty(one.shape, dtype=one.dtype)
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
        for file_name, by_tensor in requests.items():
            with self._opened(file_name) as file:
                for name, items in by_tensor.items():
                    self._fill(file, file_name, name, items, planner)

    def _fill(
        self, file: BufferedReader, file_name: str, name: str, items: list[ReadItem], planner: LoadPlanner
    ) -> None:
        dtype, header = self._manifest.tensors[name].dtype, self._headers[file_name]
        chunk = read_tensor(file, header, name, dtype, self._verify)
        for item in items:
            part = chunk
            for dimension, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dimension, start, size)
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
            if name not in self._headers:
                self._check_header(name, header_checksum(file))
                file.seek(0)
                self._headers[name] = safetensors_header.read(file, size_bytes)
            yield file

    def _check_header(self, name: str, found: str) -> None:
        if found != self._manifest.files[name]:
            raise safetensors_header.DamageError("it is not the file that was written with this checkpoint")


def _metadata(one: Any) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(at.offsets), torch.Size(at.shape)) for at in one.chunks]
    return TensorStorageMetadata(TensorProperties(one.dtype), torch.Size(one.shape), chunks)
