"""One state in one file: a safetensors file, tensor by tensor, or a file of ``torch.save``."""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import Any, BinaryIO

import torch

from polyxla_training.checkpoint import safetensors_header
from polyxla_training.checkpoint.atomic import replacing
from polyxla_training.checkpoint.errors import CheckpointError, DamagedCheckpointError, size_text
from polyxla_training.checkpoint.state_codec import EncodedState, decode_state, on_host
from polyxla_training.checkpoint.tensors import NAMED, restored, stored
from polyxla_training.storage import Location, RemotePath

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
        # The checksums come before the tensors in the file, but are known only after them; their place was
        # kept free.
        file.seek(safetensors_header.CRC_OFFSET)
        file.write(safetensors_header.checksums(start, sums))


def _upload(start: bytes, tensors: list[torch.Tensor], path: RemotePath, read: Read) -> None:
    # Bytes that were sent cannot be changed, and the checksums come first: all tensors are read once to
    # compute them, and again to send them.
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
            # torch raises a RuntimeError of its own in place of the file system's error.
            cause = error.__context__
            raise cause if isinstance(cause, OSError) else error from None


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host; the tensor must outlive it."""
    if not tensor.nbytes:
        return memoryview(b"")
    # ctypes instead of numpy, which has fewer dtypes and need not be installed.
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
    # Only whole pieces: small tensors are left to the kernel.
    if size_bytes == PIECE_BYTES and hasattr(os, "posix_fadvise") and isinstance(file, io.BufferedWriter):
        os.posix_fadvise(file.fileno(), file.tell() - size_bytes, size_bytes, os.POSIX_FADV_DONTNEED)


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
        # The checksum is right, so the file is not damaged: another program has written metadata under
        # polyxla's keys, and decoding it may raise anything.
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
        # Tied tensors refer to one tensor of the file, and share it again once they are loaded.
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
