"""A folder of checkpoints, named by their step: the newest whole one is loaded, and old ones are deleted."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyxla.console import say
from polyxla_training.checkpoint.api import load, save
from polyxla_training.checkpoint.errors import CheckpointError, DamagedCheckpointError
from polyxla_training.checkpoint.safetensors_header import is_ours

if TYPE_CHECKING:
    import torch

_NAME = re.compile(r"step-(\d{8,})(-kept)?\.safetensors")
_START_BYTES = 64


@dataclass(frozen=True)
class Entry:
    """A checkpoint of a folder.

    Attributes:
        step: the optimizer step that it was saved at.
        path: its file.
        time_s: when it was written, in seconds since 1970.
        size_bytes: its size.
        is_kept: whether it is never deleted.
    """

    step: int
    path: Path
    time_s: float
    size_bytes: int
    is_kept: bool


class CheckpointFolder:
    """The checkpoints of a run: files ``step-00000123.safetensors`` in one folder.

    Args:
        path: the folder; it is made by the first `save`.
        keep: how many to keep, those of the highest steps, beside what is kept forever; None keeps all.

    Raises:
        CheckpointError: `keep` is not a number from 1.
    """

    def __init__(self, path: str | os.PathLike[str], keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(
                f"{keep} checkpoints cannot be kept",
                where="CheckpointFolder(keep=...)",
                fix="Give a number from 1, or None for all.",
            )
        self.path = Path(path)
        self._keep = keep

    def save(self, step: int, state: Any, *, keep_forever: bool = False) -> Path:
        """Write a checkpoint; once it is durable, delete those that are too many.

        Args:
            step: the optimizer step, from 0; a checkpoint of the same step is replaced.
            state: what `polyxla_training.save` takes.
            keep_forever: whether it is never deleted, and does not count.

        Returns:
            Its file.

        Raises:
            CheckpointError: as `polyxla_training.save`; or `step` is negative.
        """
        if step < 0:
            raise CheckpointError(
                f"there is no step {step}", where="CheckpointFolder.save", fix="Count from 0."
            )
        path = self.path / f"step-{step:08d}{'-kept' if keep_forever else ''}.safetensors"
        save(state, path)
        self._delete_old(path)
        return path

    def entries(self) -> list[Entry]:
        """Return what is there, by step."""
        found = [entry for path in self.path.glob("step-*") if (entry := _entry(path)) is not None]
        return sorted(found, key=lambda entry: (entry.step, entry.is_kept))

    def latest(self) -> Entry | None:
        """Return the checkpoint of the highest step, whole or not; None if there is none."""
        return next(reversed(self.entries()), None)

    def load_latest(self, *, device: str | torch.device = "cpu") -> tuple[Entry, Any] | None:
        """Load the checkpoint of the highest step that is whole; a damaged one is named on standard error.

        Args:
            device: where its tensors are to be.

        Returns:
            The checkpoint and its state, or None if there is none.

        Raises:
            DamagedCheckpointError: there are checkpoints, and all are damaged.
            CheckpointError: one cannot be read, which says nothing about the ones before it.
        """
        damaged: list[str] = []
        for entry in reversed(self.entries()):
            try:
                state = load(entry.path, device=device)
            except DamagedCheckpointError as error:
                damaged.append(entry.path.name)
                say(f"{error.what}; taking the checkpoint before it")
            else:
                return entry, state
        if not damaged:
            return None
        raise DamagedCheckpointError(
            f"every checkpoint in {str(self.path)!r} is damaged: {', '.join(damaged)}",
            where="CheckpointFolder.load_latest",
            fix="Start from another folder, or from the beginning with an empty one.",
        )

    def _delete_old(self, written: Path) -> None:
        if self._keep is None:
            return
        passing = [entry.path for entry in self.entries() if not entry.is_kept]
        for path in passing[: -self._keep]:
            # A run that went back to an earlier step does not lose what it has just written.
            if path != written and _is_ours(path):
                path.unlink(missing_ok=True)


def _entry(path: Path) -> Entry | None:
    match = _NAME.fullmatch(path.name)
    try:
        status = path.stat()
    except FileNotFoundError:
        return None  # Another process has just deleted it.
    if match is None or not path.is_file():
        return None
    return Entry(int(match[1]), path, status.st_mtime, status.st_size, match[2] is not None)


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return is_ours(file.read(_START_BYTES))
    except OSError:
        return False
