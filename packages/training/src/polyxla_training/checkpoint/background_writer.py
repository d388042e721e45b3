"""Writing while training goes on: a copy in host memory at once, and the file from a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from polyxla_training.checkpoint.errors import CheckpointError

WAIT_TIMEOUT_S = 1800.0
"""Longest wait for the previous checkpoint to be written, in seconds: half an hour, in which a disk at
100 MB/s takes 180 GB."""


class Writer:
    """Saves in the background, one state at a time.

    A context manager; leaving it waits for the last write. Use each writer from one thread. What goes wrong
    in the background is raised by the next `submit`, or by `close`. The process does not end before its
    writes do.

    Args:
        timeout_s: longest wait for the previous write, in seconds.
    """

    def __init__(self, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._started = 0.0
        self._failure: BaseException | None = None

    def submit(self, save: Callable[[Any], object], state: Any) -> None:
        """Copy a state to host memory, and call ``save(copy)`` in a thread.

        Waits for the write before it, then for the copy, so host memory holds one copy at most; the state
        may change as soon as this returns.

        Args:
            save: `polyxla_training.save` or `CheckpointFolder.save` with all else that it takes, such as
                ``functools.partial(folder.save, step)``.
            state: what `polyxla_training.save` takes.

        Raises:
            CheckpointError: the state cannot be kept, or the write before it did not end in time.
            Exception: what the write before it raised.
        """
        from polyxla_training.checkpoint.state_packing import snapshot

        self._wait()
        copied = snapshot(state)
        self._started = time.monotonic()
        # Made anew each time, so a process that is forked in between has no thread that does not run.
        self._thread = threading.Thread(
            target=self._write, args=(save, copied), name="polyxla-checkpoint-writer"
        )
        self._thread.start()

    def close(self) -> None:
        """Wait for the last write.

        Raises:
            CheckpointError: it did not end in time.
            Exception: what it raised.
        """
        self._wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            # What ended the block matters more.
            error.add_note(f"the last checkpoint was not written either: {failure}")

    def _write(self, save: Callable[[Any], object], copied: Any) -> None:
        try:
            save(copied)
        except BaseException as error:
            self._failure = error

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join(max(0.0, self._started + self._timeout_s - time.monotonic()))
            if self._thread.is_alive():
                raise CheckpointError(
                    f"writing a checkpoint has taken longer than {self._timeout_s:g} s and goes on",
                    where="Writer(timeout_s=...)",
                    fix="Save less often, to a faster disk, or give a longer timeout_s.",
                )
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
