"""The user's private directory of sockets. Nothing here listens on a network."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from polyxla import UsageError

XDG_RUNTIME_DIR = "XDG_RUNTIME_DIR"
"""The user's directory for sockets.

Source: https://specifications.freedesktop.org/basedir-spec/latest/
"""


def socket_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory's path: in `XDG_RUNTIME_DIR`, otherwise in the directory for temporary files."""
    if parent := environ.get(XDG_RUNTIME_DIR):
        return Path(parent, "polyxla-warm")
    return Path(environ.get("TMPDIR") or tempfile.gettempdir(), f"polyxla-warm-{os.getuid()}")


def sockets(environ: Mapping[str, str]) -> list[Path]:
    """Return the sockets of this interpreter's warm processes, the newest first.

    Raises:
        UsageError: the directory is not private.
    """
    directory = socket_directory(environ)
    if not directory.is_symlink() and not directory.exists():
        return []
    _check_private(directory)
    found = directory.glob(f"{_interpreter()}-*")
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)


def new_socket(environ: Mapping[str, str], pid: int) -> Path:
    """Return the path of process `pid`'s socket, in the directory, which is made if there is none.

    Raises:
        UsageError: the directory cannot be made, or is not private.
    """
    directory = socket_directory(environ)
    try:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
    except OSError as error:
        raise UsageError(
            f"the directory {directory} for the warm process's socket cannot be made: {error}",
            where=XDG_RUNTIME_DIR if environ.get(XDG_RUNTIME_DIR) else "the directory for temporary files",
            fix=f"Set {XDG_RUNTIME_DIR} to a directory of yours.",
        ) from error
    _check_private(directory)
    return directory / f"{_interpreter()}-{pid}"


@contextlib.contextmanager
def reachable(path: Path) -> Iterator[str]:
    """Give a socket of any path a name that fits the 107 characters of a socket's address."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _check_private(directory: Path) -> None:
    """Refuse a directory that another user made, or can look into: a link is never followed.

    Raises:
        UsageError: it is not private.
    """
    found = directory.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and mode == 0o700:
        return
    kind = "is not a directory" if not stat.S_ISDIR(found.st_mode) else f"has mode {mode:o}"
    raise UsageError(
        f"{directory} {kind} and belongs to user {found.st_uid}, not mode 700 and user {os.getuid()}",
        where="the socket of polyxla warm",
        fix=f"Remove it, or set {XDG_RUNTIME_DIR} to a directory of yours.",
    )


def _interpreter() -> str:
    return hashlib.sha256(f"{sys.executable}\0{sys.prefix}".encode()).hexdigest()[:12]
