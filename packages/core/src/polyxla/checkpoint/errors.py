"""What can go wrong with a checkpoint, and the words for it."""

from __future__ import annotations

from polyxla.errors import UsageError


class CheckpointError(UsageError):
    """A checkpoint cannot be written or read: a full disk, a missing file, a nest that does not fit."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's file is not whole: cut short, changed since it was written, or no checkpoint."""


def size_text(size_bytes: int) -> str:
    """Return a size for people: ``512 bytes`` or ``3.2 MiB``."""
    if size_bytes < 2**20:
        return f"{size_bytes} bytes"
    return f"{size_bytes / 2**20:.1f} MiB" if size_bytes < 2**30 else f"{size_bytes / 2**30:.2f} GiB"
