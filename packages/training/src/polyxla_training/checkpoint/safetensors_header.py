"""The header of a safetensors file: the place of each tensor, and polyxla's metadata.

A file is eight bytes with the header's length, the header, which is JSON, and the tensors' bytes without
gaps. The header's ``__metadata__`` maps texts to texts; there polyxla stores the pytree and checksums.
Source: the README of github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from polyxla_training.checkpoint.errors import size_text

VERSION = "1"
"""Version of polyxla's metadata."""
MAX_HEADER_BYTES = 100_000_000
"""Readers of the format refuse longer headers. Source: ``MAX_HEADER_SIZE`` in safetensors/src/tensor.rs."""
LENGTH_BYTES = 8
ALIGNMENT_BYTES = 8
"""The first tensor begins at a multiple of this, as in files of the format's own writer."""
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
_PREFIX = b'{"__metadata__":{"polyxla.crc32":"'
_CRC_DIGITS = 8
CRC_OFFSET = LENGTH_BYTES + len(_PREFIX)
"""Offset of the checksums: eight hexadecimal digits for the header, in which the digits count as zeros, then
eight for each tensor in the file's order."""


class DamageError(ValueError):
    """Damage in a file; `file_reader.opened` adds the file's name."""


@dataclass(frozen=True)
class TensorSlot:
    """The place of a tensor's bytes: ``[start, stop)``, counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """A valid header.

    Attributes:
        slots: the tensors by name, in the file's order.
        checksums: each tensor's CRC-32 by name; empty in a file that polyxla did not write.
        tree: the state's pytree as JSON; None in a file that polyxla did not write.
        data_start: offset of the first tensor, in bytes from the start of the file.
    """

    slots: Mapping[str, TensorSlot]
    checksums: Mapping[str, int]
    tree: str | None
    data_start: int


def lay_out(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> list[TensorSlot]:
    """Place tensors, given as name, dtype and shape, one after another."""
    slots: list[TensorSlot] = []
    start = 0
    for name, dtype, shape in tensors:
        stop = start + math.prod(shape) * ITEM_BYTES[dtype]
        slots.append(TensorSlot(name, dtype, shape, start, stop))
        start = stop
    return slots


def encode(slots: Sequence[TensorSlot], tree: str) -> bytes:
    """Return the file's bytes before the tensors, with zeros in place of the checksums."""
    # Fixed width: the checksums are filled in later, and must not move the tensors.
    zeros = "0" * _CRC_DIGITS * (1 + len(slots))
    texts = {"polyxla.crc32": zeros, "polyxla.version": VERSION, "polyxla.nest": tree}
    content: dict[str, Any] = {"__metadata__": texts}
    for slot in slots:
        content[slot.name] = {
            "dtype": slot.dtype,
            "shape": slot.shape,
            "data_offsets": (slot.start, slot.stop),
        }
    text = json.dumps(content, separators=(",", ":")).encode("ascii")
    # JSON allows trailing spaces, which move the first tensor to an aligned offset.
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def checksums(start: bytes, tensors: Sequence[int]) -> bytes:
    """Return the bytes for `CRC_OFFSET`: the checksums of `encode`'s bytes and of the tensors."""
    return b"".join(b"%08x" % checksum for checksum in (zlib.crc32(start), *tensors))


def is_ours(start: bytes) -> bool:
    """Return whether polyxla wrote the file with these first bytes."""
    return start[LENGTH_BYTES:].startswith(_PREFIX)


def read(file: BinaryIO, size_bytes: int) -> Header:
    """Read a header, and check that it fits a file of this size.

    Raises:
        DamageError: the header is invalid, or does not fit.
    """
    length = file.read(LENGTH_BYTES)
    text_bytes = int.from_bytes(length, "little")
    # Checked before reading: the length of a damaged file may be any number, and would be allocated.
    if text_bytes > MAX_HEADER_BYTES:
        raise DamageError(
            f"its header would be {size_text(text_bytes)} long, more than a checkpoint may have"
        )
    if len(length) < LENGTH_BYTES or LENGTH_BYTES + text_bytes > size_bytes:
        raise DamageError(f"it ends within its header, after {size_text(size_bytes)}")
    text = file.read(text_bytes)
    try:
        content = json.loads(text)
        metadata = dict(content.pop("__metadata__", {}))
        slots = {name: _slot(name, **fields) for name, fields in content.items()}
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise DamageError(f"its header cannot be read: {error}") from error
    data_start = LENGTH_BYTES + text_bytes
    ordered = _check_places(slots, size_bytes - data_start)
    sums = _own(length + text, metadata, ordered)
    return Header(ordered, sums, metadata.get("polyxla.nest"), data_start)


def _slot(name: str, dtype: str, shape: list[int], data_offsets: list[int]) -> TensorSlot:
    start, stop = data_offsets
    if dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name!r} is of dtype {dtype!r}, which is unknown")
    sizes = (*shape, start, stop)
    # Computed with 1 for 0, because a dimension of 0 would hide others that overflow.
    if (
        any(type(size) is not int or size < 0 for size in sizes)
        or math.prod(size or 1 for size in shape) >= 2**60
    ):
        raise ValueError(f"tensor {name!r} has an invalid shape or offsets")
    if stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"tensor {name!r} has a size that does not fit its shape")
    return TensorSlot(name, dtype, tuple(shape), start, stop)


def _check_places(slots: Mapping[str, TensorSlot], data_bytes: int) -> dict[str, TensorSlot]:
    # Gaps and overlaps are refused as the format's own readers do: bytes outside of tensors could hide data.
    ordered = sorted(slots.values(), key=lambda slot: (slot.start, slot.stop))
    end = 0
    for slot in ordered:
        if slot.start != end:
            raise DamageError(f"tensor {slot.name!r} does not begin where the one before it ends")
        end = slot.stop
    if end != data_bytes:
        how = "is cut short" if end > data_bytes else "continues after its end"
        raise DamageError(f"it {how}: its tensors need {end} bytes and there are {data_bytes}")
    return {slot.name: slot for slot in ordered}


def _own(start: bytes, metadata: Mapping[str, Any], slots: Mapping[str, TensorSlot]) -> dict[str, int]:
    """Check the header's checksum and return those of the tensors; none for a file of another program."""
    if not is_ours(start) and not any(key.startswith("polyxla.") for key in metadata):
        return {}
    digits = str(metadata.get("polyxla.crc32")).encode()
    stop = CRC_OFFSET + len(digits)
    # The header's own checksum was computed while zeros stood in the place of all checksums.
    zeroed = start[:CRC_OFFSET] + b"0" * len(digits) + start[stop:]
    if (
        not is_ours(start)
        or len(digits) != _CRC_DIGITS * (1 + len(slots))
        or start[CRC_OFFSET:stop] != digits
    ):
        raise DamageError("its header was changed after it was written")
    try:
        own, *others = [int(digits[at : at + _CRC_DIGITS], 16) for at in range(0, len(digits), _CRC_DIGITS)]
    except ValueError as error:
        raise DamageError("its checksums were changed after it was written") from error
    if zlib.crc32(zeroed) != own:
        raise DamageError("its header was changed after it was written")
    if metadata.get("polyxla.version") != VERSION:
        raise DamageError("it was written by a version of polyxla that this one cannot read")
    return dict(zip(slots, others, strict=True))
