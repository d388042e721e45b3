"""Writing a state to a safetensors file, tensor by tensor, or to a file of ``torch.save``."""

from __future__ import annotations

import ctypes
import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch

from polyxla_training.checkpoint import safetensors_header
from polyxla_training.checkpoint.atomic_file import replacing
from polyxla_training.checkpoint.errors import CheckpointError, size_text
from polyxla_training.checkpoint.safetensors_dtypes import stored
from polyxla_training.checkpoint.state_codec import EncodedState, decode_state, on_host
from polyxla_training.storage.location import Location
from polyxla_training.storage.remote_path import RemotePath

PIECE_BYTES = 2**23
"""Size of the pieces that are summed and then written, small enough to stay in the processor's cache."""

Read = Callable[[torch.Tensor], torch.Tensor]


def write_safetensors(state: EncodedState, path: Location, read: Read | None = None) -> None:
    """Write a state to a safetensors file, one tensor in host memory at a time.

    Args:
        state: the state, none of whose tensors is divided.
        path: the file.
        read: returns the values of one of its tensors, on the host; default: those that it has.

    Raises:
        CheckpointError: the file cannot be written, or the metadata is longer than the format allows.
    """
    slots = safetensors_header.lay_out(
        [_described(stored_tensor.name, stored_tensor.tensor) for stored_tensor in state.tensors]
    )
    start = safetensors_header.encode(slots, state.tree)
    if len(start) - safetensors_header.LENGTH_BYTES > safetensors_header.MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the values other than tensors take {size_text(len(start))}, and the format allows "
            f"{size_text(safetensors_header.MAX_HEADER_BYTES)}",
            where="save",
            fix="Convert long lists, texts and bytes to tensors.",
        )
    tensors, read = [stored_tensor.tensor for stored_tensor in state.tensors], read or on_host
    if isinstance(path, RemotePath):
        _upload(start, tensors, path, read)
        return
    with replacing(path, len(start) + (slots[-1].stop if slots else 0)) as file:
        file.write(start)
        sums = [_write_tensor(read(tensor), file) for tensor in tensors]
        file.seek(safetensors_header.CRC_OFFSET)
        file.write(safetensors_header.checksums(start, sums))


def _upload(start: bytes, tensors: list[torch.Tensor], path: RemotePath, read: Read) -> None:
    # What was sent cannot be changed: the checksums, which come first, are computed before anything is sent.
    sums = [_write_tensor(read(tensor), None) for tensor in tensors]
    digits = safetensors_header.checksums(start, sums)
    offset = safetensors_header.CRC_OFFSET
    with _uploading(path) as file:
        file.write(start[:offset] + digits + start[offset + len(digits) :])
        if [_write_tensor(read(tensor), file) for tensor in tensors] != sums:
            raise CheckpointError(
                f"a tensor was changed while it was uploaded to {str(path)!r}, and the upload was cancelled",
                where="save",
                fix="Save in the thread that trains, or with a BackgroundWriter, which copies the state.",
            )


@contextmanager
def _uploading(path: RemotePath) -> Iterator[BinaryIO]:
    try:
        with path.uploading() as file:
            yield file
    except OSError as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be written: {error}; what was there before is unchanged",
            where="save",
            fix="Check the bucket's name, the credentials and the network, or write to a local path.",
        ) from error


def write_torch(state: EncodedState, path: Location) -> None:
    """Write a state with ``torch.save``; all of its tensors are in host memory at once.

    Raises:
        CheckpointError: the file cannot be written.
    """
    tensors = {stored_tensor.name: on_host(stored_tensor.tensor) for stored_tensor in state.tensors}
    decoded = decode_state(state.tree, lambda name, _: tensors[name])
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with _uploading(path) if isinstance(path, RemotePath) else replacing(path, size_bytes) as file:
        try:
            torch.save(decoded, file)
        except RuntimeError as error:
            # torch hides the error of the file system.
            cause = error.__context__
            raise cause if isinstance(cause, OSError) else error from None


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host; the tensor must outlive it."""
    if not tensor.nbytes:
        return memoryview(b"")
    # Not through numpy, which has fewer dtypes and need not be installed.
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _described(name: str, tensor: torch.Tensor) -> tuple[str, str, tuple[int, ...]]:
    described: Any = stored(tensor.dtype, tuple(tensor.shape))
    return (name, *described)


def _write_tensor(held: torch.Tensor, file: BinaryIO | None) -> int:
    """Write the bytes of a contiguous tensor on the host, if there is a file, and return their checksum."""
    data = host_bytes(held)
    checksum = 0
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        checksum = zlib.crc32(piece, checksum)
        if file is not None:
            file.write(piece)
            _write_back(file, len(piece))
    return checksum


def _write_back(file: BinaryIO, size_bytes: int) -> None:
    # Start writing to the disk now, while the next piece is prepared, instead of all at once in fsync.
    # Source: mm/fadvise.c of Linux: POSIX_FADV_DONTNEED starts the write-back of dirty pages.
    if size_bytes == PIECE_BYTES and hasattr(os, "posix_fadvise") and isinstance(file, io.BufferedWriter):
        os.posix_fadvise(file.fileno(), file.tell() - size_bytes, size_bytes, os.POSIX_FADV_DONTNEED)
