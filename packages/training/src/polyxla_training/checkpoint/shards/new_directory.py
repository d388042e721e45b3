"""A directory that appears under its name when all files are in it, and disappears as a whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from polyxla_training.checkpoint.atomic_file import create_part, directory_of, sweep, sync_directory
from polyxla_training.checkpoint.errors import CheckpointError
from polyxla_training.checkpoint.shards.layout import SHARD, STATE
from polyxla_training.storage.location import Location, files_in
from polyxla_training.storage.remote_path import RemotePath


class NewDirectory:
    """Replaces a directory. In an object store, which has no directories, its manifest makes it complete.

    Args:
        path: the directory, or its URL in an object store.
    """

    def __init__(self, path: Location) -> None:
        self._path = path
        self._part: Path | None = None
        self._lock: BinaryIO | None = None

    def create(self) -> Location:
        """Return the empty directory to write into.

        Raises:
            CheckpointError: it cannot be made.
        """
        try:
            if isinstance(self._path, RemotePath):
                (self._path / STATE).unlink(missing_ok=True)
                return self._path
            self._path.parent.mkdir(parents=True, exist_ok=True)
            sweep(self._path.parent)
            self._part, self._lock = create_part(self._path)
            directory = directory_of(self._part)
            directory.mkdir()
        except OSError as error:
            raise _error(self._path, error) from error
        return directory

    def commit(self) -> None:
        """Give the directory its name. One that had it before is deleted.

        Raises:
            CheckpointError: it cannot be renamed.
        """
        if self._part is None:
            return
        assert isinstance(self._path, Path)
        try:
            directory = directory_of(self._part)
            sync_directory(directory)
            with _aside(self._path):
                directory.rename(self._path)
            sync_directory(self._path.parent)
        except OSError as error:
            raise _error(self._path, error) from error

    def close(self) -> None:
        """Delete what was not committed."""
        if self._part is not None and self._lock is not None:
            _remove(self._part)
            self._lock.close()
            self._part = self._lock = None


def _remove(part: Path) -> None:
    shutil.rmtree(directory_of(part), ignore_errors=True)
    part.unlink(missing_ok=True)


def delete(directory: Location) -> None:
    """Delete a checkpoint's directory, if there is one; readers find all of it or nothing.

    Raises:
        OSError: it cannot be deleted.
    """
    if isinstance(directory, RemotePath):
        (directory / STATE).unlink(missing_ok=True)
        for one in list(files_in(directory, SHARD)):
            one.path.unlink(missing_ok=True)
    else:
        with _aside(directory):
            pass


@contextmanager
def _aside(directory: Path) -> Iterator[None]:
    """Rename a directory, if there is one, and delete it after the block; after an error, name it again."""
    if not directory.exists():
        yield
        return
    # A name that a later writer sweeps, should this process end here.
    part, lock = create_part(directory)
    with lock:
        try:
            directory.rename(directory_of(part))
            try:
                yield
            except BaseException:
                directory_of(part).rename(directory)
                raise
        finally:
            _remove(part)


def _error(path: Location, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} cannot be written: {error.strerror or error}",
        where="save",
        fix="Name a directory that this process may write to.",
    )
