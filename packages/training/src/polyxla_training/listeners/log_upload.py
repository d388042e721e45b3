"""The listener that copies a run's files to an object store."""

from __future__ import annotations

import os
from pathlib import Path

from polyxla import UsageError, hookimpl
from polyxla_training.listeners.loggers.csv_file import METRICS_FILE
from polyxla_training.observe.run_log import RUN_LOG
from polyxla_training.storage.directory_upload import DirectoryUpload
from polyxla_training.storage.remote_path import RemotePath


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
