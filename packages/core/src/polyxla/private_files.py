"""Files of this user that no other user of the machine can read, write or put in the way."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from polyxla.errors import UsageError

HOME = "HOME"
"""The user's home directory.
Default: not set, and the directory for temporary files is used.
"""

XDG_STATE_HOME = "XDG_STATE_HOME"
"""The user's directory for state; a relative path is ignored.
Default: ``.local/state`` in `HOME`.
Source: XDG Base Directory Specification 0.8.
"""
WHERE_PRIVATE = (XDG_STATE_HOME, HOME, "TMPDIR")
"""The variables that say where the private directory is."""
_KEY = "key"
_KEY_BYTES = 32


def private_directory(environ: Mapping[str, str]) -> Path:
    """Return the user's private directory, which is made if there is none.

    It is in the user's directory for state. Only where that cannot be used is it in the directory for
    temporary files, where another user can take its name.

    Args:
        environ: the environment that names these directories.

    Raises:
        UsageError: neither can be used.
    """
    problems = []
    for directory in _candidates(environ):
        if (problem := _make(directory)) is None:
            return directory
        problems.append(f"{directory} {problem}")
    raise UsageError(
        f"this user has no private directory: {'; '.join(problems)}",
        where=f"{HOME}, TMPDIR",
        fix=f"Set {XDG_STATE_HOME} to a directory of yours.",
    )


def write_private(file: Path, data: bytes) -> None:
    """Write a file in the private directory, whole or not at all, that only this user can read.

    Raises:
        OSError: it cannot be written.
    """
    temporary = _unfinished(file, data)
    try:
        # A rename is atomic: a reader sees the old file or the whole new one.
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def user_key(environ: Mapping[str, str]) -> bytes:
    """Return the user's own key: random bytes that all their processes on this machine can read.

    Raises:
        UsageError: there is no private directory to keep it in.
    """
    file = private_directory(environ) / _KEY
    if not file.exists():
        temporary = _unfinished(file, secrets.token_bytes(_KEY_BYTES))
        # Several processes may arrive here together. A link fails if the name exists, so all use the first
        # key.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, file)
        temporary.unlink()
    return file.read_bytes()


def _unfinished(file: Path, data: bytes) -> Path:
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    # With its mode from the start, because a later chmod would leave a moment in which others can open it.
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(data)
    return temporary


def _candidates(environ: Mapping[str, str]) -> list[Path]:
    state, home = environ.get(XDG_STATE_HOME, ""), environ.get(HOME, "")
    if not state.startswith("/"):
        state = f"{home}/.local/state" if home.startswith("/") else ""
    temporary = Path(environ.get("TMPDIR") or tempfile.gettempdir(), f"polyxla-{os.geteuid()}")
    return [Path(state, "polyxla", "private"), temporary] if state else [temporary]


def _make(directory: Path) -> str | None:
    """Make a directory, unless there is one; return why it is not private, or None. No link is followed."""
    try:
        with contextlib.suppress(FileExistsError):
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir(mode=0o700)
        # Inspect what is there, whoever made it: in the directory for temporary files, another user may have
        # taken the name first.
        found = directory.lstat()
    except OSError as error:
        return f"cannot be made: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a directory"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        return f"has mode {mode:o}, not 700"
    # Directories also need execute permission, without which no file in them can be opened.
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return "is not writable"
    return None
