"""Atomic replacement of a file: readers find the old file or the new one, never a part.

The new file is written beside the old one under a temporary name, synced to the disk, and renamed. Its writer
locks it, and the lock ends with the writer's process. So any later writer, on any host, recognises the files
that killed writers left behind, and removes them.
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

SUFFIX = ".polyxla-part"
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
                os.fsync(file.fileno())
                part.replace(path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
        sync_directory(path.parent)
    except OSError as error:
        raise _error(path, size_bytes, error) from error


def sweep(directory: Path) -> None:
    """Remove the files and directories that killed writers left in a directory."""
    for part in directory.glob(f".*{SUFFIX}"):
        # A living writer has the lock. On a file system without locks, nothing is removed.
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
        # Cut, because a name may have at most 255 bytes.
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
        return True  # The file system has no locks, so no sweep removes the file.
    # A sweep between open and flock has removed the file; the lock is then on a file without a name.
    return part.exists()


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable, where the file system can."""
    # The rename is durable after this. Some network file systems cannot sync a directory: not an error.
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _error(path: Path, size_bytes: int, error: OSError) -> CheckpointError:
    kept = "; the previous checkpoint is unchanged" if _is_there(path) else ""
    what = f"{str(path)!r} cannot be written: {error.strerror or error}"
    if error.errno not in _FULL:
        fix = "Name a file in a directory that this process may write to."
        return CheckpointError(f"{what}{kept}", where="save", fix=fix)
    free = size_text(shutil.disk_usage(next(one for one in path.absolute().parents if one.exists())).free)
    what += f": it needs {size_text(size_bytes)} and {free} are free"
    fix = "Free some space, keep fewer checkpoints, or name another directory."
    return CheckpointError(f"{what}{kept}", where="save", fix=fix)


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False  # Its directory is not readable.
