"""Files, and directories of shards, that appear whole or not at all.

A new file is written beside the old one under a temporary name, synced to the disk, and renamed. Its writer
locks it, and the lock ends with the writer's process. So any later writer, on any host, recognises what
killed writers left behind, and removes it. A directory is written in the same way; a locked file beside it
stands for it, because directories cannot be locked everywhere. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from polyxla_training.checkpoint.errors import CheckpointError, size_text
from polyxla_training.storage import Location, RemotePath, files_in

SUFFIX = ".polyxla-part"
"""End of the names of files that are being written."""
STATE = "state.safetensors"
"""File of the manifest. It is written last: a directory without it is not a checkpoint."""
SHARD = "shard-"
"""Beginning of the names of the other files, each of which has the shards of one replica."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def replacing(path: Path, size_bytes: int) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path`, durably, when the block ends.

    Missing directories are made. If the block raises, the new file is removed and the old one is unchanged.
    Any number of threads and processes may replace the same path: each writes its own file, and the last to
    finish wins.

    Args:
        path: the file to replace.
        size_bytes: minimum size of the new file, for the error if it does not fit.

    Raises:
        CheckpointError: the file system raised an error.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent)
        part, file = create_part(path)
        with file:
            try:
                yield file
                file.flush()
                # Before the rename: after a crash of the machine, the new name must not lead to a file
                # without its data.
                os.fsync(file.fileno())
                part.replace(path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
        sync_directory(path.parent)
    except OSError as error:
        raise _file_error(path, size_bytes, error) from error


def sweep(directory: Path) -> None:
    """Remove the files and directories that killed writers left in a directory."""
    for part in directory.glob(f".*{SUFFIX}"):
        # A living writer has the lock, so taking it fails and the part stays. On a file system without locks,
        # nothing is removed: leftovers are better than another writer's file deleted.
        with contextlib.suppress(OSError), part.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory_of(part), ignore_errors=True)
            part.unlink()


def directory_of(part: Path) -> Path:
    """Return the directory whose writer locks `part`: directories cannot be locked everywhere."""
    return part.with_name(f"{part.name}-directory")


def create_part(path: Path) -> tuple[Path, BinaryIO]:
    """Create and lock a file beside `path`, under a temporary name.

    Raises:
        OSError: it cannot be created.
    """
    while True:
        # The name is cut, because it may have at most 255 bytes.
        part = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}{SUFFIX}")
        file = part.open("xb")
        if _is_locked(part, file):
            return part, file
        file.close()


def _is_locked(part: Path, file: BinaryIO) -> bool:
    """Lock the file; False if a sweep came first, and has removed the file or is about to."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # The file system has no locks, so no sweep removes the file.
        return True
    # A sweep between open and flock has removed the file; the lock is then on a file without a name.
    return part.exists()


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable, where the file system can."""
    # A rename is durable only once its directory is synced. Some network file systems cannot sync one; the
    # checkpoint is complete there all the same.
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _file_error(path: Path, size_bytes: int, error: OSError) -> CheckpointError:
    kept = "; the previous checkpoint is unchanged" if _is_there(path) else ""
    what = f"{str(path)!r} cannot be written: {error.strerror or error}"
    if error.errno not in _FULL:
        fix = "Name a file in a directory that this process may write to."
        return CheckpointError(f"{what}{kept}", where="save", fix=fix)
    # The nearest directory that exists: the missing ones would have been made on the same disk.
    free = size_text(
        shutil.disk_usage(next(parent for parent in path.absolute().parents if parent.exists())).free
    )
    what += f": it needs {size_text(size_bytes)} and {free} are free"
    fix = "Free some space, keep fewer checkpoints, or name another directory."
    return CheckpointError(f"{what}{kept}", where="save", fix=fix)


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        # Its directory is not readable.
        return False


def is_sharded(place: Location) -> bool:
    """Return whether a checkpoint is a directory, not a file."""
    if not isinstance(place, RemotePath):
        return place.is_dir()
    # An object store has no directories, only names with slashes: the manifest tells a checkpoint.
    try:
        (place / STATE).stat()
    except OSError:
        return False
    return True


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
            raise _directory_error(self._path, error) from error
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
            # Its files are durable already: each writer has synced its own.
            sync_directory(directory)
            with _aside(self._path):
                directory.rename(self._path)
            sync_directory(self._path.parent)
        except OSError as error:
            raise _directory_error(self._path, error) from error

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
    # The manifest goes first: what is left without it cannot be taken for a checkpoint, whatever happens now.
    if isinstance(directory, RemotePath):
        (directory / STATE).unlink(missing_ok=True)
        for file in list(files_in(directory, SHARD)):
            file.path.unlink(missing_ok=True)
    else:
        with _aside(directory):
            pass


@contextlib.contextmanager
def _aside(directory: Path) -> Iterator[None]:
    """Rename a directory, if there is one, and delete it after the block; after an error, name it again."""
    if not directory.exists():
        yield
        return
    # The old directory gets the name of a part: if this process ends before it has deleted it, a later writer
    # sweeps it.
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


def _directory_error(path: Location, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} cannot be written: {error.strerror or error}",
        where="save",
        fix="Name a directory that this process may write to.",
    )
