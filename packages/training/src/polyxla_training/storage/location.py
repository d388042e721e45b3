"""The place that a user names: a local path, or the URL of a file or directory in an object store."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from polyxla_training.storage.remote_path import RemotePath, check_scheme

Location = Path | RemotePath
"""`RemotePath` has those methods of `Path` that are used here."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]+)://")


@dataclass(frozen=True)
class FileInfo:
    """A file in a directory.

    Attributes:
        path: its place.
        size_bytes: its size.
        time_s: time of its last change, in seconds since 1970.
    """

    path: Location
    size_bytes: int
    time_s: float


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether the user named a place in an object store."""
    return isinstance(locate(path), RemotePath)


def locate(path: str | os.PathLike[str]) -> Location:
    """Return the place that the user named; it is not looked at."""
    if isinstance(path, RemotePath):
        return path
    text = os.fspath(path)
    match = _URL.match(text)
    if match is None:
        return Path(path)
    if match[1].lower() == "file":
        return Path(unquote(urlsplit(text).path))
    return RemotePath(text.rstrip("/"))


def check_location(path: str | os.PathLike[str], where: str) -> None:
    """Check that a place can be used: that what a URL needs is installed.

    Args:
        path: what the user wrote.
        where: the function or option, named in the error.

    Raises:
        UsageError: no installed package knows the URL's scheme.
    """
    place = locate(path)
    if isinstance(place, RemotePath):
        check_scheme(place.url, where)


def directories_in(directory: Location, prefix: str) -> Iterator[Location]:
    """Yield the directories in a directory whose names begin with `prefix`."""
    found = directory.directories() if isinstance(directory, RemotePath) else directory.glob(f"{prefix}*/")
    yield from (one for one in found if one.name.startswith(prefix))


def files_in(directory: Location, prefix: str) -> Iterator[FileInfo]:
    """Yield the files in a directory whose names begin with `prefix`; none if there is no directory."""
    if isinstance(directory, RemotePath):
        yield from (FileInfo(*found) for found in directory.files() if found[0].name.startswith(prefix))
        return
    for path in directory.glob(f"{prefix}*"):
        # Another process may delete it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if path.is_file():
                yield FileInfo(path, status.st_size, status.st_mtime)
