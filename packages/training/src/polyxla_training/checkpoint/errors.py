"""What can go wrong with a checkpoint, and the words for it."""

from __future__ import annotations

from polyxla.errors import UsageError


class CheckpointError(UsageError):
    """A checkpoint cannot be written or read: a full disk, a missing file, a nest that does not fit."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's file is not whole: cut short, changed since it was written, or no checkpoint."""


def size_text(size_bytes: int) -> str:
    """Return a size for people: ``512 bytes`` or ``3.2 MiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} bytes"
