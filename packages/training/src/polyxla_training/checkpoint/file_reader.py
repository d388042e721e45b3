"""Reading a state from a safetensors file of any writer, or from a file of ``torch.save``."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import Any

import torch

from polyxla_training.checkpoint import safetensors_header
from polyxla_training.checkpoint.errors import CheckpointError, DamagedCheckpointError
from polyxla_training.checkpoint.file_writer import PIECE_BYTES, host_bytes
from polyxla_training.checkpoint.safetensors_dtypes import NAMED, restored
from polyxla_training.checkpoint.state_codec import decode_state
from polyxla_training.storage.location import Location

_TORCH_STARTS = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")
"""First bytes of torch's zip files, and of the pickles that it wrote before 1.6, which begin with its
``MAGIC_NUMBER``. Source: torch/serialization.py."""


@contextmanager
def opened(path: Location) -> Iterator[BufferedReader]:
    """Open a checkpoint, and name it in the errors of the block.

    Raises:
        CheckpointError: the file cannot be read.
        DamagedCheckpointError: the block raised `DamageError`.
    """
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read: {error.strerror or error}",
            where="load",
            fix="Name a checkpoint's file that this process may read.",
        ) from error
    except safetensors_header.DamageError as error:
        raise DamagedCheckpointError(
            f"{str(path)!r} is damaged, or is not a checkpoint: {error}",
            where="load",
            fix="Load another checkpoint.",
        ) from error


def is_torch(file: BufferedReader) -> bool:
    """Return whether a file is one of ``torch.save``, by its first bytes; then rewind it."""
    start = file.read(safetensors_header.LENGTH_BYTES)
    file.seek(0)
    # The length of a safetensors header may start with the same bytes, but its upper half is zero.
    return start.startswith(_TORCH_STARTS) and any(start[4:])


def header_checksum(file: BufferedReader) -> str:
    """Return the checksum of a header, which holds those of all tensors."""
    length = file.read(safetensors_header.LENGTH_BYTES)
    text_bytes = min(int.from_bytes(length, "little"), safetensors_header.MAX_HEADER_BYTES)
    return f"{zlib.crc32(length + file.read(text_bytes)):08x}"


def read_safetensors(file: BufferedReader, size_bytes: int, device: torch.device, verify: bool) -> Any:
    """Read a state. If `device` is not the host, one tensor at a time is in host memory.

    Raises:
        DamageError: the file is not as it was written.
    """
    tensors = _Tensors(file, safetensors_header.read(file, size_bytes), device, verify)
    if tensors.header.tree is None:
        return {slot.name: tensors(slot.name, NAMED[slot.dtype]) for slot in tensors.header.slots.values()}
    try:
        return decode_state(tensors.header.tree, tensors)
    except (OSError, MemoryError, safetensors_header.DamageError):
        raise
    except Exception as error:
        # The checksum is right, so a program other than polyxla wrote this, and any error may come of it.
        raise safetensors_header.DamageError(f"polyxla did not write its metadata: {error!r}") from error


def read_torch(file: BufferedReader, name: str, device: torch.device) -> Any:
    """Read a file of ``torch.save`` that holds tensors and plain values only.

    Raises:
        CheckpointError: reading it could run code.
        DamageError: the file is damaged.
    """
    try:
        return torch.load(file, map_location=device, weights_only=True)
    except (OSError, MemoryError):
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{name!r} holds more than tensors and plain values, and reading it could run "
            f"any code: {str(error).splitlines()[0]}",
            where="load",
            fix="If you trust it, read it with torch.load(..., weights_only=False) and save what you need.",
        ) from error
    except Exception as error:
        raise safetensors_header.DamageError(
            f"torch cannot read it: {str(error).partition(chr(10))[0]}"
        ) from error


class _Tensors:
    """The tensors of an open file, each read on first use."""

    def __init__(
        self, file: BufferedReader, found: safetensors_header.Header, device: torch.device, verify: bool
    ) -> None:
        self.header = found
        self._file = file
        self._device = device
        self._verify = verify
        self._read: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._read:
            tensor = read_tensor(self._file, self.header, name, dtype, self._verify)
            self._read[name] = tensor.to(self._device)
        return self._read[name]


def read_tensor(
    file: BufferedReader, header: safetensors_header.Header, name: str, dtype: torch.dtype, verify: bool
) -> torch.Tensor:
    """Read one tensor of an open file to the host, in the dtype that it had.

    Raises:
        DamageError: it is not as it was written.
    """
    slot = header.slots[name]
    tensor = torch.empty(slot.shape, dtype=NAMED[slot.dtype])
    file.seek(header.data_start + slot.start)
    checksum = _read_into(file, host_bytes(tensor), verify)
    if verify and checksum != header.checksums.get(name, checksum):
        raise safetensors_header.DamageError(f"tensor {name!r} was changed after it was written")
    return tensor if tensor.dtype is dtype else restored(tensor, dtype)


def _read_into(file: BufferedReader, data: memoryview, verify: bool) -> int:
    """Fill `data` from a file; return its checksum, or 0 without `verify`."""
    checksum = 0
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        if file.readinto(piece) < len(piece):
            raise safetensors_header.DamageError("it was cut short while it was read")
        if verify:
            checksum = zlib.crc32(piece, checksum)
    return checksum
