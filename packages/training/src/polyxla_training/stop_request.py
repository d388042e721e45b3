"""Forward SIGTERM from the launching process to the replicas."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from polyxla_training.checkpoint.stop_signal import StopSignal
from polyxla_training.storage.location import locate

SIGNALLED = "SIGTERM"
"""Why a training ended, if the signal asked it to."""
STOP_FILE = ".stop"
"""In the checkpoint directory, from a SIGTERM until the replicas have saved their last checkpoint."""


def stop_file(checkpoint_dir: str | os.PathLike[str]) -> Path:
    """Return the file that asks the replicas of this host to stop.

    If the directory is in an object store, the file is in this machine's directory of temporary files:
    replicas look for it between steps, which must not wait for a network.
    """
    directory = locate(checkpoint_dir)
    if isinstance(directory, Path):
        return directory / STOP_FILE
    name = hashlib.sha256(os.fspath(directory).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"polyxla-{os.getuid()}" / f"{name}{STOP_FILE}"


@contextlib.contextmanager
def forward_sigterm(checkpoint_dir: str | os.PathLike[str] | None) -> Iterator[None]:
    """Within the block, make the first SIGTERM stop the replicas after a checkpoint, not this process.

    A file carries the request: it reaches replicas in threads and in processes. A second signal ends this
    process. Outside the main thread, or without a directory, signals keep their handlers.
    """
    if checkpoint_dir is None:
        yield
        return
    file = stop_file(checkpoint_dir)
    file.unlink(missing_ok=True)
    with StopSignal(then=lambda: _request_stop(file)):
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def _request_stop(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
