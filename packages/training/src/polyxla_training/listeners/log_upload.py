"""The listener that copies a run's files to an object store while they grow."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

from polyxla import UsageError, hookimpl
from polyxla.plugin import say, say_once
from polyxla_training.listeners.loggers import METRICS_FILE
from polyxla_training.observe.run_log import RUN_LOG
from polyxla_training.storage import RemotePath

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
        # Objects cannot be appended to: a resumed run downloads what it continues, and uploads the whole
        # again.
        continued = {}
        for name in continues:
            with contextlib.suppress(FileNotFoundError):
                continued[name] = (remote / name).read_bytes()
        self.path = Path(tempfile.mkdtemp(prefix="polyxla-log-"))
        for name, content in continued.items():
            (self.path / name).write_bytes(content)
        self._is_closed = threading.Event()
        # A daemon: a process that ends without `close` must not be kept alive by its uploads.
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
            # Both, because a file system may give two writes the same time.
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


class LogUploadListener:
    """Provides a local directory for other listeners, and uploads its files while the training runs.

    Add it before the listeners that write these files.

    Args:
        log_dir: URL of the run's directory.

    Attributes:
        path: the local directory.

    Raises:
        UsageError: the object store cannot be read.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        try:
            self._upload = DirectoryUpload(
                RemotePath(os.fspath(log_dir).rstrip("/")), continues=[RUN_LOG, METRICS_FILE]
            )
        except OSError as error:
            raise UsageError(
                f"{os.fspath(log_dir)!r} cannot be read: {error}",
                where="Trainer(log_dir=...)",
                fix="Check the bucket's name, the credentials and the network, or name a local path.",
            ) from error
        self.path: Path = self._upload.path

    @hookimpl
    def polyxla_replica_stopped(self) -> None:
        """Upload the files, which the other listeners have closed: the last one added is called first."""
        self._upload.close()
