"""Copying batches to the device ahead of the loop that uses them. Heavy: imported in the replica."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

from polyxla import UsageError
from polyxla.plugin import InputWatchdog, callsite

AHEAD = {"loader_prefetch_size": 16, "device_prefetch_size": 8}
"""The options of ``prefetch`` with their defaults: batches read ahead on the host, and batches on the device.
Source: the names and numbers are those of torch_xla 2.9.0, so that a script needs no change here.
"""
THREADS = "host_to_device_transfer_threads"
"""The third of torch_xla's options; here one thread copies."""
LEAVE_S = 60.0
"""Longest wait for the threads when a loop is left, in seconds: the next loop may read the same."""
_END = object()


def upload_batches(
    batches: Generator[Any], to_device: Callable[[Any], Any], prefetch: Mapping[str, int], timeout_s: float
) -> Generator[Any]:
    """Iterate over `batches` on the device; one thread reads ahead, and another copies.

    Args:
        batches: read in a thread.
        to_device: copies one of them.
        prefetch: how far to read and to copy ahead, by the names in `AHEAD`.
        timeout_s: longest wait for a batch, in seconds.

    Raises:
        UsageError: there is no option of that name.
        StalledError: a batch did not arrive in time.
    """
    _check(prefetch)
    on_host, on_device = (max(1, prefetch.get(name, default)) for name, default in AHEAD.items())
    reading = _Ahead(batches, on_host, "polyxla-input")
    copying = _Ahead(map(to_device, reading), on_device, "polyxla-upload")
    watchdog = InputWatchdog(timeout_s, reading.line, copying.cancel)
    # After an exception, do not wait for the threads: one may hang in the user's dataset.
    leave_s = 0.0
    try:
        arriving = iter(copying)
        while True:
            watchdog.begin()
            batch = next(arriving, _END)
            watchdog.end()
            # This comes before the check for the end: the watchdog ends the wait with the same mark.
            if watchdog.error:
                raise watchdog.error
            if batch is _END:
                break
            yield batch
        leave_s = LEAVE_S
    except GeneratorExit:
        leave_s = LEAVE_S
        raise
    finally:
        watchdog.close()
        # Both are closed before either is joined: the thread that copies waits for the one that reads.
        copying.close()
        reading.close()
        copying.join(leave_s)
        reading.join(leave_s)


def _check(prefetch: Mapping[str, int]) -> None:
    if unknown := sorted(set(prefetch) - {*AHEAD, THREADS}):
        raise UsageError(
            f"this runtime's loader has no option {', '.join(unknown)}",
            where="prefetch",
            fix=f"The options are {', '.join(AHEAD)}.",
        )
    if prefetch.get(THREADS, 1) != 1:
        raise UsageError(
            f"{THREADS}={prefetch[THREADS]}, but this runtime copies in one thread",
            where="prefetch",
            fix=f"Leave {THREADS} out.",
        )


class _Ahead:
    """Iterates over a source in a thread, a number of items ahead of its consumer.

    Iterating raises what ended the source early.

    Args:
        source: closed by the thread at its end, if it can be closed.
        size: how many items to hold.
        name: the thread's.
    """

    def __init__(self, source: Iterable[Any], size: int, name: str) -> None:
        self._source = source
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._places = threading.Semaphore(size)
        self._is_closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for item in self._source:
                # The item has been read already: the thread holds one more than `size`.
                self._places.acquire()
                # Checked after the wait for a place, which `close` ends.
                if self._is_closed:
                    break
                self._arrived.put(item)
        except BaseException as error:
            self._failure = error
        finally:
            getattr(self._source, "close", lambda: None)()
            self._arrived.put(_END)

    def __iter__(self) -> Iterator[Any]:
        while (item := self._arrived.get()) is not _END:
            self._places.release()
            yield item
        if self._failure and not self._is_closed:
            raise self._failure

    def line(self) -> str | None:
        """Return the user's line that the thread is executing; None if it executes none."""
        return callsite.user_line(self._thread.ident)

    def cancel(self) -> None:
        """Wake the consumer."""
        self._arrived.put(_END)

    def close(self) -> None:
        """End the thread at its next item, and wake the consumer."""
        self._is_closed = True
        # The thread may wait for a place, and the consumer for an item: wake both.
        self._places.release()
        self.cancel()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, `timeout_s` seconds at most."""
        self._thread.join(timeout_s)
