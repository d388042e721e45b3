"""A local directory that is copied to an object store while its files grow."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

from polyxla.plugin import say, say_once
from polyxla_training.storage.remote_path import RemotePath

EVERY_S = 60.0
"""Interval at which changed files are uploaded, in seconds."""


class DirectoryUpload:
    """A temporary directory, whose changed files are uploaded every minute and at the end, by a thread.

    Objects cannot be appended to, so each file is uploaded whole, which suits logs. Failed uploads repeat.

    Args:
        remote: the directory in the object store.
        continues: names of files that are appended to; those that exist are downloaded first.
        every_s: interval of the uploads, in seconds.

    Attributes:
        path: the local directory. `close` deletes it, unless an upload has failed.

    Raises:
        OSError: a file to continue cannot be read.
    """

    def __init__(self, remote: RemotePath, continues: Iterable[str] = (), every_s: float = EVERY_S) -> None:
        self._remote = remote
        self._every_s = every_s
        self._uploaded: dict[Path, tuple[int, int]] = {}
        self.path = Path(tempfile.mkdtemp(prefix="polyxla-log-"))
        for name in continues:
            with contextlib.suppress(FileNotFoundError):
                (self.path / name).write_bytes((remote / name).read_bytes())
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="polyxla-log-upload", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Upload what has changed since the last upload, and delete the local directory.

        Prints to standard error that files could not be uploaded, and where they are.
        """
        self._is_closed.set()
        self._thread.join()
        problem = self._upload()
        if problem:
            say(f"{problem}; the files stay in {self.path}")
        else:
            shutil.rmtree(self.path, ignore_errors=True)

    def _run(self) -> None:
        while not self._is_closed.wait(self._every_s):
            if problem := self._upload():
                say_once(f"{problem}; it is tried again every {self._every_s:g} s")

    def _upload(self) -> str:
        """Upload changed files; return what failed, or an empty text."""
        for path in sorted(self.path.rglob("*")):
            status = path.stat()
            version = (status.st_mtime_ns, status.st_size)
            if not path.is_file() or self._uploaded.get(path) == version:
                continue
            target = self._remote / path.relative_to(self.path).as_posix()
            try:
                target.write_bytes(path.read_bytes())
            except OSError as error:
                return f"{os.fspath(target)} cannot be written: {error}"
            self._uploaded[path] = version
        return ""
