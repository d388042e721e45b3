"""Copying batches to the device ahead of the loop that uses them. Heavy: imported in the replica."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any

from polyxla import callsite
from polyxla.errors import UsageError
from polyxla.xla.input_watchdog import InputWatchdog

AHEAD = "device_prefetch_size"
"""The option of ``prefetch``: batches held on the device before they are used (default: 2)."""
DEFAULT = 2
LEAVE_S = 60.0
"""Longest wait for the reading thread when a loop is left, in seconds: the next loop may read the same."""
_END = object()


def upload_batches(
    batches: Generator[Any], to_device: Callable[[Any], Any], prefetch: Mapping[str, int], timeout_s: float
) -> Generator[Any]:
    """Iterate over `batches` on the device; a thread reads and copies ahead.

    Args:
        batches: read in that thread.
        to_device: copies one of them.
        prefetch: how many batches to hold ahead, by the name in `AHEAD`.
        timeout_s: longest wait for a batch, in seconds.

    Raises:
        UsageError: there is no option of that name.
        StalledError: a batch did not arrive in time.
    """
    if unknown := sorted(set(prefetch) - {AHEAD}):
        raise UsageError(
            f"this runtime's loader has no option {', '.join(unknown)}",
            where="prefetch",
            fix=f"The only option is {AHEAD}.",
        )
    reader = _Reader(batches, to_device, max(1, prefetch.get(AHEAD, DEFAULT)))
    watchdog = InputWatchdog(timeout_s, reader.line, reader.cancel)
    leave_s = 0.0
    try:
        while True:
            watchdog.begin()
            batch = reader.take()
            watchdog.end()
            if watchdog.error:
                raise watchdog.error
            if batch is _END:
                leave_s = LEAVE_S
                reader.raise_failure()
                return
            yield batch
    except GeneratorExit:
        leave_s = LEAVE_S
        raise
    finally:
        watchdog.close()
        reader.close(leave_s)


class _Reader:
    """The thread that reads and copies; after an exception the loop does not wait for it, as it may hang."""

    def __init__(self, batches: Generator[Any], to_device: Callable[[Any], Any], ahead: int) -> None:
        self._batches, self._to_device = batches, to_device
        self._arrived: queue.Queue[Any] = queue.Queue()
        self._places = threading.Semaphore(ahead)
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name="polyxla-upload", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            self._places.acquire()
            for batch in self._batches:
                if self._stop.is_set():
                    break
                self._arrived.put(self._to_device(batch))
                self._places.acquire()
        except BaseException as error:
            self._failure = error
        finally:
            self._batches.close()
            self._arrived.put(_END)

    def take(self) -> Any:
        """Return the next batch, or the end."""
        batch = self._arrived.get()
        self._places.release()
        return batch

    def raise_failure(self) -> None:
        """Raise what ended the batches early."""
        if self._failure:
            raise self._failure

    def line(self) -> str | None:
        """Return the user's line that the thread is executing; None if it executes none."""
        return callsite.user_line(self._thread.ident)

    def cancel(self) -> None:
        """End the wait of the loop."""
        self._arrived.put(_END)

    def close(self, leave_s: float) -> None:
        """End the thread; wait for it `leave_s` seconds at most."""
        self._stop.set()
        self._places.release()
        self._thread.join(leave_s)
