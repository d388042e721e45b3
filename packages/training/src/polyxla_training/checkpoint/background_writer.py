"""Saving in the background: a copy to host memory first, then the file from a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from polyxla_training.checkpoint.errors import CheckpointError

WAIT_TIMEOUT_S = 1800.0
"""Maximum wait for the previous checkpoint, in seconds: in half an hour a disk writes 180 GB at 100 MB/s."""


class BackgroundWriter:
    """Saves in the background, one state at a time.

    A context manager; leaving it waits for the last write. Use each writer from one thread. The next `submit`
    or `close` raises the errors of the background. The process does not end before its writes do.

    Args:
        timeout_s: maximum wait for the previous write, in seconds.
    """

    def __init__(self, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._started = 0.0
        self._failure: BaseException | None = None

    def submit(self, save: Callable[[Any], object], state: Any) -> None:
        """Copy a state to host memory, and call ``save(copy)`` in a thread.

        Waits for the previous write, then for the copy, so host memory holds at most one copy. The state may
        change as soon as this returns.

        Args:
            save: `polyxla_training.save` or `CheckpointFolder.save` with its other arguments, such as
                ``functools.partial(folder.save, step)``.
            state: as for `polyxla_training.save`.

        Raises:
            CheckpointError: the state has a value of an unsupported type, or the previous write did not end
                in time.
            Exception: what the previous write raised.
        """
        from polyxla_training.checkpoint.state_codec import snapshot

        self._wait()
        copied = snapshot(state)
        self._started = time.monotonic()
        # A new thread each time: a process that is forked in between does not inherit a dead one.
        self._thread = threading.Thread(
            target=self._write, args=(save, copied), name="polyxla-checkpoint-writer"
        )
        self._thread.start()

    def close(self) -> None:
        """Wait for the last write.

        Raises:
            CheckpointError: the write did not end in time.
            Exception: what the write raised.
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
            # The error that ended the block is the one to raise.
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
                    f"writing a checkpoint has taken longer than {self._timeout_s:g} s and is not finished",
                    where="BackgroundWriter(timeout_s=...)",
                    fix="Save less often, use a faster disk, or pass a longer timeout_s.",
                )
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
