"""Reading the files that hold tokens and certificates. A variable or an option names each of them."""

from __future__ import annotations

import stat
from pathlib import Path

from polyxla import UsageError
from polyxla.plugin import say_once

MIN_TOKEN_CHARS = 16
"""Minimum length of a token: shorter ones can be guessed."""


def read_file(path: Path, where: str) -> bytes:
    """Read a file that a setting names.

    Args:
        path: the file.
        where: the setting, as an error names it.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}", where=where, fix="Name a file that exists."
        ) from None


def read_token(path: Path, where: str) -> str:
    """Read a token from its file, without surrounding whitespace such as the final newline.

    Args:
        path: the file.
        where: the setting that names it, for errors.

    Raises:
        UsageError: the file cannot be read, or holds no valid token.
    """
    token = read_file(path, where).decode(errors="replace").strip()
    if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        say_once(f"other users of this machine can read the token in {path}: chmod 600 {path}")
    # Headers of HTTP/2 carry the token, and gRPC takes only printable ASCII there.
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable():
        raise UsageError(
            f"{path} does not hold a token of at least {MIN_TOKEN_CHARS} printable ASCII characters",
            where=where,
            fix="Make one with: python -c 'import secrets; print(secrets.token_hex(32))'",
        )
    return token
