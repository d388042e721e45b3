"""A directory of checkpoints, named by step: loads the newest intact one, and deletes old ones.

A checkpoint is a file, or a directory with the shards of a state that replicas have divided.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from polyxla.plugin import say
from polyxla_training.checkpoint.api import load, save
from polyxla_training.checkpoint.atomic import STATE
from polyxla_training.checkpoint.errors import CheckpointError, DamagedCheckpointError
from polyxla_training.checkpoint.safetensors_header import is_ours
from polyxla_training.storage import (
    FileInfo,
    Location,
    check_location,
    directories_in,
    files_in,
    locate,
)

if TYPE_CHECKING:
    import torch

    from polyxla_training.checkpoint.state_codec import EncodedState

_NAME = re.compile(r"step-(\d{8,})(-kept|-best)?\.(safetensors|shards)")
Loaded = TypeVar("Loaded")
_START_BYTES = 64


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint in a `CheckpointFolder`.

    Attributes:
        step: the optimizer step that it was saved at.
        path: its file, or the directory of its shards; for a URL, an object with the name, whose text is the
            URL.
        time_s: time of writing, in seconds since 1970.
        size_bytes: its size, that of all shards together.
        is_kept: whether it is never deleted.
        is_best: whether it was the best of the run when it was saved; the last such one is kept.
    """

    step: int
    path: Location
    time_s: float
    size_bytes: int
    is_kept: bool
    is_best: bool = False


class CheckpointFolder:
    """The checkpoints of a run: files ``step-00000123.safetensors`` in one directory.

    Those whose tensors are divided among replicas are directories, ``step-00000123.shards``.

    Args:
        path: the directory, or its URL in an object store; the first `save` makes it.
        keep: number of checkpoints to keep, those of the highest steps, in addition to those that are kept
            forever; None keeps all.

    Raises:
        CheckpointError: `keep` is less than 1.
        UsageError: a package that the URL needs is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(
                f"keep={keep} is not a positive integer",
                where="CheckpointFolder(keep=...)",
                fix="Write keep=1, or None to keep all.",
            )
        check_location(path, "CheckpointFolder")
        self.path = locate(path)
        self._keep = keep

    def save(self, step: int, state: Any, *, keep_forever: bool = False, is_best: bool = False) -> Location:
        """Write a checkpoint; once it is durable, delete the oldest ones beyond `keep`.

        A collective, if the state's tensors are divided among replicas; ordinal 0 deletes.

        Args:
            step: the optimizer step, from 0; a checkpoint of the same step is replaced.
            state: as for `polyxla_training.save`.
            keep_forever: never delete it, and do not count it.
            is_best: do not delete it before a better one is saved, and do not count it until then.

        Returns:
            The path of the file or directory.

        Raises:
            CheckpointError: as for `polyxla_training.save`; or `step` is negative.
        """
        if step < 0:
            raise CheckpointError(
                f"step={step} is negative", where="CheckpointFolder.save", fix="Count steps from 0."
            )
        from polyxla_training.checkpoint.state_codec import EncodedState, encode_state

        # Encoded here too, because the name depends on whether the tensors are divided.
        encoded = state if isinstance(state, EncodedState) else encode_state(state)
        name = f"step-{step:08d}{'-kept' if keep_forever else '-best' if is_best else ''}"
        path = self.path / f"{name}.{'shards' if encoded.is_divided else 'safetensors'}"
        if _write(encoded, path):
            self._delete_old(path)
        return path

    def entries(self) -> list[CheckpointEntry]:
        """Return the checkpoints by step.

        Raises:
            CheckpointError: the directory cannot be listed.
        """
        try:
            files = [*files_in(self.path, "step-"), *_shards_in(self.path)]
            found = [entry for file in files if (entry := _entry(file)) is not None]
        except OSError as error:
            raise CheckpointError(
                f"{str(self.path)!r} cannot be listed: {error}",
                where="CheckpointFolder",
                fix="Name a directory that this process may read; for a URL, check credentials and network.",
            ) from error
        # By time last: a step may be there as a file and as shards, and the newer one counts.
        return sorted(found, key=lambda entry: (entry.step, entry.is_kept, entry.time_s))

    def latest(self) -> CheckpointEntry | None:
        """Return the checkpoint of the highest step, intact or not; None if there is none."""
        return next(reversed(self.entries()), None)

    def best(self) -> CheckpointEntry | None:
        """Return the checkpoint that was last saved as the best, intact or not; None if there is none."""
        # By time and not by step: a run that resumed from an earlier step may have found a better state at a
        # lower one.
        found = [entry for entry in self.entries() if entry.is_best]
        return max(found, key=lambda entry: (entry.time_s, entry.step), default=None)

    def load_latest(self, *, device: str | torch.device = "cpu") -> tuple[CheckpointEntry, Any] | None:
        """Load the intact checkpoint of the highest step; print the names of damaged ones to standard error.

        Args:
            device: device for the tensors.

        Returns:
            The checkpoint and its state, or None if there are no checkpoints.

        Raises:
            DamagedCheckpointError: there are checkpoints, and all are damaged.
            CheckpointError: a file cannot be read; it may be intact, so older ones are not tried.
        """
        return self.newest_intact(partial(load, device=device))

    def newest_intact(self, read: Callable[[Location], Loaded]) -> tuple[CheckpointEntry, Loaded] | None:
        """Read the intact checkpoint of the highest step; print the names of damaged ones to standard error.

        Args:
            read: reads a checkpoint, or raises `DamagedCheckpointError`.

        Returns:
            The checkpoint and what `read` returned, or None if there are no checkpoints.

        Raises:
            DamagedCheckpointError: as for `load_latest`.
            CheckpointError: as for `load_latest`.
        """
        damaged: list[str] = []
        for entry in reversed(self.entries()):
            try:
                state = read(entry.path)
            # Only damage leads to an older checkpoint. A file that cannot be read now may be intact, and
            # resuming before it would repeat and overwrite work.
            except DamagedCheckpointError as error:
                damaged.append(entry.path.name)
                say(f"{error.what}; loading the checkpoint before it")
            else:
                return entry, state
        if not damaged:
            return None
        raise DamagedCheckpointError(
            f"every checkpoint in {str(self.path)!r} is damaged: {', '.join(damaged)}",
            where="CheckpointFolder.load_latest",
            fix="Resume from another directory, or start from the beginning with an empty one.",
        )

    def _delete_old(self, written: Location) -> None:
        if self._keep is None:
            return
        try:
            best, entries = self.best(), self.entries()
        except CheckpointError as error:
            # The new checkpoint is safe, so a training need not end for this.
            say(f"old checkpoints are not deleted: {error.what}")
            return
        # Only the latest of the best is kept: those before it were the best of an earlier time.
        others = (entry for entry in entries if best is None or entry.path != best.path)
        deletable = [entry.path for entry in others if not entry.is_kept]
        for path in deletable[: -self._keep]:
            # After resuming from an earlier checkpoint, the file just written may have the lowest step. Files
            # that polyxla has not written are never deleted, whatever their names.
            if path != written and _is_ours(path):
                _delete(path)


def _write(state: EncodedState, path: Location) -> bool:
    """Write a checkpoint; return whether this replica deletes old ones."""
    if not state.is_divided:
        save(state, path)
        return True
    from polyxla_training.checkpoint.shard_writer import write_shards

    return write_shards(state, path)


def _shards_in(directory: Location) -> Iterator[FileInfo]:
    """Yield the directories of shards, each with the size of its files and the time of its manifest."""
    for path in directories_in(directory, "step-"):
        files = list(files_in(path, ""))
        # A directory without a manifest is not complete: its writer was killed, or still writes.
        times = [file.time_s for file in files if file.path.name == STATE]
        if times:
            yield FileInfo(path, sum(file.size_bytes for file in files), times[0])


def _entry(file: FileInfo) -> CheckpointEntry | None:
    match = _NAME.fullmatch(file.path.name)
    if match is None:
        return None
    suffix = match[2]
    return CheckpointEntry(
        int(match[1]), file.path, file.time_s, file.size_bytes, suffix == "-kept", suffix == "-best"
    )


def _delete(path: Location) -> None:
    try:
        if path.name.endswith(".shards"):
            from polyxla_training.checkpoint.atomic import delete

            delete(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        # The new checkpoint is safe, so a training need not end for this.
        say(f"the old checkpoint {path} cannot be deleted: {error}")


def _is_ours(path: Location) -> bool:
    file_path = path / STATE if path.name.endswith(".shards") else path
    try:
        with file_path.open("rb", buffering=_START_BYTES) as file:
            return is_ours(file.read(_START_BYTES))
    except OSError:
        return False
