"""How the word to end, which the launching process gets, reaches replicas in processes of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from polyxla_training.checkpoint.stop_signal import StopSignal

STOP_FILE = ".stop"
"""In the folder of checkpoints, while a process that was told to end waits for its replicas' last one."""


@contextlib.contextmanager
def passed_on(folder: str | None) -> Iterator[None]:
    """Meanwhile, let SIGTERM ask the replicas that save into `folder` to end, instead of ending this process.

    A file asks them: it reaches every kind of process. A second signal ends this process. In another thread
    than the main one, and without a folder, nothing is changed.
    """
    if folder is None:
        yield
        return
    file = Path(folder) / STOP_FILE
    file.unlink(missing_ok=True)
    with StopSignal(then=lambda: _ask(file)):
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def _ask(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
