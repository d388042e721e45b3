"""The errors of checkpoints, and the form of sizes in their texts."""

from __future__ import annotations

from polyxla import UsageError


class CheckpointError(UsageError):
    """A checkpoint cannot be written or read: a full disk, a missing file, an unsupported value."""


class DamagedCheckpointError(CheckpointError):
    """A file is damaged: cut short, changed since it was written, or not a checkpoint."""


def size_text(size_bytes: int) -> str:
    """Return a readable size, such as ``512 bytes`` or ``3.2 MiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} bytes"
