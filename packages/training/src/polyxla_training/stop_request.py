"""Forward SIGTERM and Ctrl-C from the launching process to the replicas."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from polyxla.plugin import private_directory, snapshot
from polyxla_training.checkpoint.stop_signal import StopSignal
from polyxla_training.storage.location import locate

SIGNALLED = "a signal"
"""Why a training ended, if SIGTERM or Ctrl-C asked it to."""
STOP_FILE = ".stop"
"""In the checkpoint directory, from the signal until the replicas have saved their last checkpoint."""
INTERRUPTED = b"polyxla: training ends after this step, and saves it; press Ctrl-C again to end at once\n"


def stop_file(checkpoint_dir: str | os.PathLike[str]) -> Path:
    """Return the file that asks the replicas of this host to stop.

    If the directory is in an object store, the file is in the user's private directory on this machine:
    replicas look for it between steps, which must not wait for a network.
    """
    directory = locate(checkpoint_dir)
    if isinstance(directory, Path):
        return directory / STOP_FILE
    name = hashlib.sha256(os.fspath(directory).encode()).hexdigest()[:16]
    return private_directory(snapshot()) / f"{name}{STOP_FILE}"


@contextlib.contextmanager
def forward_signals(checkpoint_dir: str | os.PathLike[str] | None) -> Iterator[StopSignal]:
    """Within the block, make the first SIGTERM or Ctrl-C stop the replicas after a checkpoint.

    A file carries the request: it reaches replicas in threads and in processes. A second signal does what it
    does without the block. Outside the main thread, or without a directory, so does the first one.

    Yields:
        What holds the signal that was received.
    """
    if checkpoint_dir is None:
        yield StopSignal()
        return
    file = stop_file(checkpoint_dir)
    file.unlink(missing_ok=True)
    with StopSignal(signal.SIGTERM, signal.SIGINT, then=lambda: _request_stop(file, stop)) as stop:
        try:
            yield stop
        finally:
            file.unlink(missing_ok=True)


def _request_stop(file: Path, stop: StopSignal) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    if stop.received is signal.SIGINT:
        # Not print(): this may have interrupted one.
        os.write(2, INTERRUPTED)
