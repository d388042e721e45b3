"""Writing a state: a safetensors file, tensor by tensor, or a file of ``torch.save``."""

from __future__ import annotations

import ctypes
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch

from polyxla_training.checkpoint import safetensors_header
from polyxla_training.checkpoint.atomic_file import replacing
from polyxla_training.checkpoint.errors import CheckpointError, size_text
from polyxla_training.checkpoint.safetensors_dtypes import stored
from polyxla_training.checkpoint.state_packing import Packed, on_host, unpack

PIECE_BYTES = 2**23
"""How much is summed and written at once: it is still in the processor's cache for the second."""


def write_safetensors(packed: Packed, path: Path) -> None:
    """Write a state to a safetensors file, one tensor in host memory at a time.

    Raises:
        CheckpointError: the file system refuses, or the nest is longer than the format allows.
    """
    slots = safetensors_header.lay_out([_described(part.name, part.tensor) for part in packed.parts])
    start = safetensors_header.encode(slots, packed.nest)
    if len(start) - safetensors_header.LENGTH_BYTES > safetensors_header.MAX_HEADER_BYTES:
        raise CheckpointError(
            f"what is not tensors takes {size_text(len(start))}, and the format has room for "
            f"{size_text(safetensors_header.MAX_HEADER_BYTES)}",
            where="save",
            fix="Make tensors of long lists, texts and bytes.",
        )
    with replacing(path, len(start) + (slots[-1].stop if slots else 0)) as file:
        file.write(start)
        sums = [_write_tensor(file, part.tensor) for part in packed.parts]
        file.seek(safetensors_header.CRC_OFFSET)
        file.write(safetensors_header.checksums(start, sums))


def write_torch(packed: Packed, path: Path) -> None:
    """Write a state with ``torch.save``; all of its tensors are in host memory meanwhile.

    Raises:
        CheckpointError: the file system refuses.
    """
    tensors = {part.name: on_host(part.tensor) for part in packed.parts}
    state = unpack(packed.nest, lambda name, _: tensors[name])
    with replacing(path, sum(tensor.nbytes for tensor in tensors.values())) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch hides what the file system said.
            cause = error.__context__
            raise cause if isinstance(cause, OSError) else error from None


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor that is on the host and has no gaps; the tensor must outlive it."""
    if not tensor.nbytes:
        return memoryview(b"")
    # Without numpy, which knows fewer dtypes and need not be installed.
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _described(name: str, tensor: torch.Tensor) -> tuple[str, str, tuple[int, ...]]:
    kept: Any = stored(tensor.dtype, tuple(tensor.shape))
    return (name, *kept)


def _write_tensor(file: BinaryIO, tensor: torch.Tensor) -> int:
    """Write a tensor's bytes and return their checksum."""
    held = on_host(tensor)
    data = host_bytes(held)
    checksum = 0
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        checksum = zlib.crc32(piece, checksum)
        file.write(piece)
        if len(piece) == PIECE_BYTES:
            _write_back(file)
    return checksum


def _write_back(file: BinaryIO) -> None:
    # The disk works while the next piece is made, instead of all at once in fsync.
    # Source: mm/fadvise.c of Linux: POSIX_FADV_DONTNEED begins to write what is not written yet.
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), file.tell() - PIECE_BYTES, PIECE_BYTES, os.POSIX_FADV_DONTNEED)
