"""A file that is replaced as a whole: readers find the old one or the new one, whatever happens between.

The new one is written beside the old under a name of its own, reaches the disk, and is renamed. Its writer
holds a lock on it, which ends with the writer however that ends; so any later writer can tell what a killed
one left behind, on whatever host, and remove it.
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
    """Give a new file to write; when the block ends well, it is durable and is `path`.

    Missing folders are made. If the block fails nothing is left of the new file, and the old one is as it
    was. Any number of threads and processes may replace the same path: each writes its own file, and the last
    to finish wins.

    Args:
        path: what to replace.
        size_bytes: how much will be written at least, for the error if it does not fit.

    Raises:
        CheckpointError: the file system refuses.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent)
        part, file = _create(path)
        with file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                part.replace(path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
        _sync_folder(path.parent)
    except OSError as error:
        raise _refused(path, size_bytes, error) from error


def sweep(folder: Path) -> None:
    """Remove what writers that were killed left in a folder."""
    for part in folder.glob(f".*{SUFFIX}"):
        # A writer that lives has the lock; where there are no locks nothing is removed.
        with contextlib.suppress(OSError), part.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()


def _create(path: Path) -> tuple[Path, BinaryIO]:
    while True:
        # Cut, because a name may have 255 bytes.
        part = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}{SUFFIX}")
        file = part.open("xb")
        if _is_locked(part, file):
            return part, file
        file.close()


def _is_locked(part: Path, file: BinaryIO) -> bool:
    """Take the lock; False if a sweep was quicker, and has removed the file or is about to."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # No locks here, so nobody sweeps.
    return part.exists()


def _sync_folder(folder: Path) -> None:
    # The new file is in place; some network file systems refuse to sync a folder.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _refused(path: Path, size_bytes: int, error: OSError) -> CheckpointError:
    kept = "; the previous checkpoint is kept" if _is_there(path) else ""
    what = f"{str(path)!r} cannot be written: {error.strerror or error}"
    if error.errno not in _FULL:
        fix = "Give a file in a folder that this process may write to."
        return CheckpointError(f"{what}{kept}", where="save", fix=fix)
    free = size_text(shutil.disk_usage(next(one for one in path.absolute().parents if one.exists())).free)
    what += f": it needs {size_text(size_bytes)} and {free} are free"
    fix = "Make room, keep fewer checkpoints, or give another folder."
    return CheckpointError(f"{what}{kept}", where="save", fix=fix)


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False  # In a folder that may not be looked into.
