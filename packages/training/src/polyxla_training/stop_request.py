"""Forward SIGTERM from the launching process to the replicas."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from polyxla_training.checkpoint.stop_signal import StopSignal

STOP_FILE = ".stop"
"""In the checkpoint directory, from a SIGTERM until the replicas have saved their last checkpoint."""


@contextlib.contextmanager
def forward_sigterm(checkpoint_dir: str | os.PathLike[str] | None) -> Iterator[None]:
    """Within the block, make the first SIGTERM stop the replicas after a checkpoint, not this process.

    A file carries the request: it reaches replicas in threads and in processes. A second signal ends this
    process. Outside the main thread, or without a directory, signals keep their handlers.
    """
    if checkpoint_dir is None:
        yield
        return
    file = Path(checkpoint_dir) / STOP_FILE
    file.unlink(missing_ok=True)
    with StopSignal(then=lambda: _request_stop(file)):
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def _request_stop(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
