"""``--sync``: a local directory as a tar file, which travels over each host's connection."""

from __future__ import annotations

import base64
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from polyxla import UsageError
from polyxla_pod.launcher.connection import HostConnection
from polyxla_pod.messages import UNTAKEN_PARTS

CHUNK_BYTES = 1 << 16
"""Size of the parts in which the file is sent, in bytes."""
UNPACK_S = 600.0
"""Longest wait for a host to unpack the rest of the file, in seconds."""
TAKE_S = 60.0
"""Longest wait for a host to write a part of the file, in seconds."""
LIST_S = 60.0
"""Longest wait for git to list a directory's files, in seconds."""
_LEFT_OUT = {".git", ".venv", "__pycache__"}


def pack(directory: Path, file: IO[bytes]) -> None:
    """Write the files of a directory as a compressed tar file.

    In a git repository, these are the files that git does not ignore; elsewhere all files except those in
    ``.git``, ``.venv`` and ``__pycache__``.

    Raises:
        UsageError: there is no such directory.
    """
    if not directory.is_dir():
        raise UsageError(
            f"there is no directory {directory}", where=f"--sync {directory}", fix="Name an existing one."
        )
    # Level 1, because the network is often faster than a better compression.
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
        for name in sorted(_names(directory)):
            # Not recursive, because `_names` lists the content of directories, without what is left out.
            archive.add(directory / name, arcname=name, recursive=False)


def _names(directory: Path) -> Iterator[Path]:
    """Return what is in a directory, as paths relative to it."""
    # Without -z, git would quote names with letters beyond ASCII.
    command = ["git", "-C", str(directory), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIST_S)
    except (OSError, subprocess.SubprocessError):
        # There is no git here, or the directory is in no repository.
        for path in directory.rglob("*"):
            name = path.relative_to(directory)
            if not _LEFT_OUT.intersection(name.parts):
                yield name
        return
    for name in map(Path, filter(None, {*done.stdout.split("\0")})):
        path = directory / name
        if path.is_dir() and not path.is_symlink():
            # Of a submodule, or a repository within this one, git lists only the directory. A submodule that
            # was not fetched is empty, and git in it would list the outer repository.
            inner = _names(path) if (path / ".git").exists() else ()
            yield from (name / part for part in inner)
        # git lists a file that was removed, until the removal is committed.
        elif path.exists():
            yield name


async def send(connection: HostConnection, file: Path, directory: str) -> None:
    """Send a tar file to a host, and wait until it is unpacked there.

    Raises:
        HostEndedError: the host ended, or could not unpack it.
    """
    with file.open("rb") as source:
        is_last, count = False, 0
        while not is_last:
            data = source.read(CHUNK_BYTES)
            # A file of a multiple of this size ends with an empty part.
            is_last = len(data) < CHUNK_BYTES
            text = base64.b64encode(data).decode()
            connection.send("archive", directory=directory, data=text, last=is_last)
            count += 1
            await connection.taken(count - UNTAKEN_PARTS, TAKE_S)
    await connection.answer("unpacked", UNPACK_S)
