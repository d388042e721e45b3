"""The directory of the compilation cache: permissions, atomic writes, size limit.

Any number of threads, processes and jobs may use one directory at the same time.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import threading
import time
from pathlib import Path

LIMIT_BYTES = 2 << 30
"""Maximum size of the cache, in bytes: about a thousand programs of small networks, or a hundred of large."""
SWEEP_BYTES = 64 << 20
"""Bytes that a process writes between two checks of the size."""
ABANDONED_S = 3600.0
"""Age from which an unfinished file counts as left behind by a killed writer, in seconds."""
PREFIX = "polyxla-"
"""Name prefix of the cache's files; torch_xla writes others to the same directory."""


def why_unusable(directory: Path, *, is_private: bool) -> str | None:
    """Make a directory if it does not exist; return why it cannot be used, or None.

    Args:
        directory: its path.
        is_private: whether other users must not be able to write there, since cached code is run.
    """
    try:
        directory.mkdir(mode=0o700 if is_private else 0o777, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        return str(error)
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return f"{directory} is not writable"
    if is_private and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
        return f"other users may write to {directory}"
    return None


class CacheDirectory:
    """Files by name; a reader never sees a partly written file.

    Args:
        path: the directory, made at the first write.
        limit_bytes: maximum size; the least recently used files are evicted.
    """

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.path = path
        self._limit_bytes = limit_bytes
        # So that the first write of a process checks the size.
        self._written_bytes = SWEEP_BYTES
        self._lock = threading.Lock()

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a file, then evict others if the cache is too large.

        The data is not flushed to disk, which would take longer than compiling a small program: a file that
        a crash of the machine damages fails its checksum.

        Raises:
            OSError: the file cannot be written; nothing remains of it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        # Not by `tempfile`, because other users could not read its files in a shared directory.
        temporary = self.path / f".{name}.{secrets.token_hex(8)}"
        try:
            with temporary.open("xb") as file:
                file.write(data)
            temporary.replace(self.path / name)
        finally:
            temporary.unlink(missing_ok=True)
        if self._is_sweep_due(len(data)):
            self.sweep()

    def _is_sweep_due(self, size_bytes: int) -> bool:
        with self._lock:
            self._written_bytes += size_bytes
            if self._written_bytes < SWEEP_BYTES:
                return False
            self._written_bytes = 0
            return True

    def read(self, name: str, *, is_use: bool) -> bytes:
        """Return the content of a file.

        Args:
            name: of the file.
            is_use: whether the file becomes the most recently used one.

        Raises:
            OSError: the file does not exist or cannot be read, or everyone may write to the directory, and
                another user has written it: it would be run.
        """
        # A pipe that another user has put there must not be waited for.
        with os.fdopen(os.open(self.path / name, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            is_everyones = bool(self.path.stat().st_mode & stat.S_IWOTH)
            if not stat.S_ISREG(found.st_mode) or (is_everyones and found.st_uid not in (0, os.geteuid())):
                raise PermissionError(f"user {found.st_uid} has put it where everyone may write")
            if is_use:
                # Another user's file can be read, but its times cannot be set.
                with contextlib.suppress(PermissionError):
                    os.utime(file.fileno())
            return file.read()

    def sweep(self) -> None:
        """Evict the least recently used programs, and delete what killed writers left behind.

        Files that cannot be deleted, such as another user's in a shared directory, stay.
        """
        programs = []
        for path, status in self._files():
            if path.name.startswith("."):
                if time.time() - status.st_mtime > ABANDONED_S:
                    _delete(path)
            else:
                programs.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in programs) - self._limit_bytes
        for _, size, path in sorted(programs):
            if excess <= 0:
                return
            # Another process that sweeps now deletes the same files in the same order: no more than needed.
            _delete(path)
            excess -= size

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        found = []
        with os.scandir(self.path) as entries:
            for entry in entries:
                if entry.name.startswith((PREFIX, f".{PREFIX}")):
                    try:
                        found.append((Path(entry.path), entry.stat(follow_symlinks=False)))
                    except FileNotFoundError:
                        continue
        return found


def _delete(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):
        path.unlink()
