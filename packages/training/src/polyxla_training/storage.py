"""Files and directories, on this machine or in an object store: the places that a user names.

`RemotePath` has the methods of `pathlib.Path` that polyxla uses, through fsspec. An object appears whole or
not at all: its upload is completed by one request, after the last byte. Every failure is an OSError, also
where the package that fsspec uses raises something else. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from polyxla import UsageError
from polyxla.plugin import pip_install

PART_BYTES = 2**26
"""Size of the parts in which a file is uploaded and read. S3 accepts 10,000 parts: files of up to 640 GiB."""
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}
"""Extras of polyxla-training, by scheme."""
_TIMES = ("LastModified", "mtime", "updated", "last_modified", "created")
"""Names of the time of the last change, in what is returned about a file. Source: s3fs, gcsfs, adlfs and
fsspec's memory file system."""


@dataclass(frozen=True)
class RemoteStatus:
    """The size and the time of a file, under the names of `os.stat_result`.

    Attributes:
        st_size: size in bytes.
        st_mtime: time of the last change, in seconds since 1970; 0 if unknown.
    """

    st_size: int
    st_mtime: float


@dataclass(frozen=True)
class RemotePath(os.PathLike[str]):
    """A file or a directory in an object store.

    Attributes:
        url: its URL, without a slash at the end.
    """

    url: str

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self.url.rpartition("/")[2]

    def stat(self) -> RemoteStatus:
        """Ask for the file's size and time.

        Raises:
            OSError: there is no such file, or the store cannot be asked.
        """
        with _file_system(self.url) as (store, path):
            return _status(store.info(path))

    def read_bytes(self) -> bytes:
        """Return the file's content.

        Raises:
            OSError: there is no such file, or it cannot be read.
        """
        with _file_system(self.url) as (store, path):
            return bytes(store.cat_file(path))

    def open(self, mode: str = "rb", buffering: int = PART_BYTES) -> io.BufferedReader:
        """Open the file for reading.

        Args:
            mode: ``rb``.
            buffering: number of bytes that are read at once.

        Raises:
            OSError: there is no such file, or it cannot be read.
        """
        if mode != "rb":
            raise ValueError(f"mode {mode!r} is not 'rb'")
        # Asked first: reading beyond the end is an error in some stores.
        size = self.stat().st_size
        # At least 1 byte: an empty file has no part to buffer.
        return io.BufferedReader(_Reader(self, size), max(1, min(buffering, size)))

    @contextmanager
    def uploading(self) -> Iterator[BinaryIO]:
        """Open a file that is uploaded while it is written, and replaces the object when the block ends.

        It cannot seek. If the block raises, an object of this name is unchanged.

        Raises:
            OSError: the upload failed.
        """
        # Without a transaction, closing the file would complete the upload even after an error. A transaction
        # belongs to the object of the file system, which threads share unless a new one is made.
        with (
            _file_system(self.url, skip_instance_cache=True) as (store, path),
            store.transaction,
            store.open(path, "wb", block_size=PART_BYTES) as file,
        ):
            yield file

    def write_bytes(self, data: bytes) -> None:
        """Replace the object by `data`.

        Raises:
            OSError: the upload failed.
        """
        with _file_system(self.url) as (store, path):
            store.pipe_file(path, data)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the file.

        Raises:
            OSError: it cannot be deleted.
        """
        try:
            with _file_system(self.url) as (store, path):
                store.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def files(self) -> Iterator[tuple[RemotePath, int, float]]:
        """Yield the path, size and time of each file in the directory; none if there is no directory.

        Raises:
            OSError: the store cannot be asked.
        """
        for file in self._listed("file"):
            status = _status(file)
            yield self / file["name"].rpartition("/")[2], status.st_size, status.st_mtime

    def directories(self) -> Iterator[RemotePath]:
        """Yield the directories in the directory: the prefixes of objects that end with a slash.

        Raises:
            OSError: the store cannot be asked.
        """
        for directory in self._listed("directory"):
            yield self / directory["name"].rstrip("/").rpartition("/")[2]

    def _listed(self, kind: str) -> Iterator[dict[str, Any]]:
        try:
            with _file_system(self.url) as (store, path):
                found = store.ls(path, detail=True)
        except FileNotFoundError:
            return
        # Stores list files and prefixes together; fsspec calls the prefixes directories.
        yield from (entry for entry in found if entry["type"] == kind)


class _Reader(io.RawIOBase):
    """Reads ranges of a file; it has no connection of its own and no state but the position."""

    def __init__(self, remote: RemotePath, size_bytes: int) -> None:
        super().__init__()
        self._remote = remote
        self._size = size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        stop = min(self._position + len(buffer), self._size)
        if stop <= self._position:
            return 0
        with _file_system(self._remote.url) as (store, path):
            # A request per range, so there is no connection that could be lost between two reads.
            data = store.cat_file(path, start=self._position, end=stop)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def check_scheme(url: str, where: str) -> None:
    """Check that fsspec and the package that it needs for a URL are installed.

    Raises:
        UsageError: one is not, or fsspec does not know the scheme.
    """
    # Checked before training: a package that is missing would otherwise be noticed at the first checkpoint.
    scheme = url.partition("://")[0]
    extra = _EXTRAS.get(scheme)
    try:
        import fsspec.registry

        fsspec.get_filesystem_class(scheme)
    except ValueError as error:
        raise UsageError(
            f"{url!r} is not a URL that fsspec knows: {error}",
            where=where,
            fix="Write a local path, or a URL such as gs://bucket/directory or s3://bucket/directory.",
        ) from error
    except ImportError as error:
        advice = (
            f"pip install {_package(scheme)}" if extra is None else pip_install(f"polyxla-training[{extra}]")
        )
        raise UsageError(
            f"{url!r} needs a package that is not installed: {error}",
            where=where,
            fix=f"Install it: {advice}",
        ) from error


def _package(scheme: str) -> str:
    """Return the package that has the file system of a scheme."""
    try:
        from fsspec.registry import known_implementations
    except ImportError:
        return "fsspec"
    # fsspec knows which module has the file system of a scheme, even where it is not installed.
    module: str = known_implementations[scheme]["class"].partition(".")[0]
    return module


@contextmanager
def _file_system(url: str, **options: bool) -> Iterator[tuple[Any, str]]:
    """Yield fsspec's file system for a URL, and the path in it; turn all errors into OSErrors."""
    try:
        import fsspec

        store, path = fsspec.url_to_fs(url, **options)
        # fsspec remembers what it has listed, and other processes write to the store too.
        store.invalidate_cache()
        yield store, path
    except (OSError, UsageError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _status(found: dict[str, Any]) -> RemoteStatus:
    time = next((found[name] for name in _TIMES if found.get(name) is not None), 0.0)
    if isinstance(time, str):
        time = datetime.fromisoformat(time)
    # Stores report the time as a number, as text or as a datetime.
    return RemoteStatus(int(found["size"]), time.timestamp() if isinstance(time, datetime) else float(time))


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
    # A file: URL is a local path, and works without fsspec.
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
    """Yield the directories in a directory whose names begin with `prefix`; none if there is no directory.

    Raises:
        OSError: the directory cannot be listed.
    """
    if isinstance(directory, RemotePath):
        yield from (path for path in directory.directories() if path.name.startswith(prefix))
    else:
        yield from (path for path in _paths_in(directory, prefix) if path.is_dir())


def files_in(directory: Location, prefix: str) -> Iterator[FileInfo]:
    """Yield the files in a directory whose names begin with `prefix`; none if there is no directory.

    Raises:
        OSError: the directory cannot be listed.
    """
    if isinstance(directory, RemotePath):
        yield from (FileInfo(*found) for found in directory.files() if found[0].name.startswith(prefix))
        return
    for path in _paths_in(directory, prefix):
        # Another process may delete the file between the listing and this call.
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if path.is_file():
                yield FileInfo(path, status.st_size, status.st_mtime)


def _paths_in(directory: Path, prefix: str) -> list[Path]:
    # Not Path.glob, which finds nothing in a directory that cannot be listed.
    try:
        return [path for path in directory.iterdir() if path.name.startswith(prefix)]
    except FileNotFoundError:
        return []
