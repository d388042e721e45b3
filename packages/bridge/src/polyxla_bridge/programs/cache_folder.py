"""The folder of compiled programs: who may use it, how a file gets there whole, how large it becomes.

Any number of threads, processes and jobs may do all of this at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from pathlib import Path

LIMIT_BYTES = 2 << 30
"""How much is kept, in bytes: some thousand programs of small networks, some hundred of large ones."""
SWEEP_BYTES = 64 << 20
"""How much a process adds, in bytes, before it looks again whether that is too much."""
ABANDONED_S = 3600.0
"""From which age on a file that nobody has finished is one that nobody will, in seconds."""
PREFIX = "polyxla-"
"""How the names of our files begin; torch_xla keeps others in the same folder."""


def unfit(folder: Path, *, is_own: bool) -> str | None:
    """Make a folder if it is not there, and return why it cannot be used; None if it can.

    Args:
        folder: the folder.
        is_own: whether nobody else may be able to write there: what is found is run.
    """
    try:
        folder.mkdir(mode=0o700 if is_own else 0o777, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        return str(error)
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return f"{folder} may not be written to"
    if is_own and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
        return f"others may write to {folder}"
    return None


class CacheFolder:
    """Files by name. None is ever seen half written.

    Args:
        path: made when something is written.
        limit_bytes: how much is kept; what was used last goes last.
    """

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.path = path
        self._limit_bytes = limit_bytes
        # The first addition is followed by a look.
        self._added_bytes = SWEEP_BYTES
        self._lock = threading.Lock()

    def write(self, name: str, data: bytes) -> None:
        """Put a file in the place of what is there; delete what there is too much of.

        It is not forced to the disk, which takes longer than small programs do: what a crash of the machine
        leaves of it has another checksum.

        Raises:
            OSError: it cannot be written; there is none then.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        # Not of `tempfile`, whose files nobody else may read.
        temporary = self.path / f".{name}.{secrets.token_hex(8)}"
        try:
            with temporary.open("xb") as file:
                file.write(data)
            temporary.replace(self.path / name)
        finally:
            temporary.unlink(missing_ok=True)
        if self._is_due(len(data)):
            self.sweep()

    def _is_due(self, size_bytes: int) -> bool:
        with self._lock:
            self._added_bytes += size_bytes
            if self._added_bytes < SWEEP_BYTES:
                return False
            self._added_bytes = 0
            return True

    def read(self, name: str, *, is_noted: bool) -> bytes:
        """Return what a file holds.

        Args:
            name: the file's.
            is_noted: whether it is to count as just used.

        Raises:
            OSError: it cannot be read, or is not there.
        """
        with (self.path / name).open("rb") as file:
            if is_noted:
                # Another person's file may be read, but not noted.
                with contextlib.suppress(PermissionError):
                    os.utime(file.fileno())
            return file.read()

    def sweep(self) -> None:
        """Delete the programs that were not used for longest, and what killed writers left.

        What may not be deleted, such as another person's in a shared folder, stays.
        """
        kept = []
        for path, status in self._files():
            if path.name.startswith("."):
                if time.time() - status.st_mtime > ABANDONED_S:
                    _delete(path)
            else:
                kept.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in kept) - self._limit_bytes
        for _, size, path in sorted(kept):
            if excess <= 0:
                return
            # Who sweeps at the same time deletes the same ones.
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
