"""Uploading batches to the device with torch_xla's MpDeviceLoader. Heavy: imported in the replica."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
from torch_xla.debug import profiler
from torch_xla.distributed.parallel_loader import MpDeviceLoader

from polyxla import callsite
from polyxla.errors import PolyxlaError, UsageError
from polyxla.xla.input_watchdog import InputWatchdog

OPTIONS = ("loader_prefetch_size", "device_prefetch_size", "host_to_device_transfer_threads")
"""The options of ``prefetch``: batches read ahead on the host (torch_xla's default: 16), batches held on the
device (8; they are copied together, so the first waits for the eighth), and threads that copy (1; with more,
the order may change).
Source: `torch_xla.distributed.parallel_loader.ParallelLoader` of torch_xla 2.9.0.
"""
LEAVE_S = 60.0
"""Longest wait for the reading thread when a loop is left, in seconds: the next loop may read the same."""
LOST = "a thread of torch_xla failed (see above), and the loop did not get all batches"
NEVER = 2**62
"""Batches per execution: torch_xla must not sync, because `polyxla.Replica` does, once per batch."""


# torch_xla's Trace uses JAX for torchax alone, but sets and removes a variable for it at each batch that a
# thread copies. Two threads at once fail with KeyError, and the epoch of one ends.
_profiler: Any = profiler
_get_jax = _profiler.maybe_get_jax
_profiler.maybe_get_jax = lambda log=True: _get_jax(log) if "torchax" in sys.modules else None


def upload_batches(
    batches: Generator[Any], device: torch.device, prefetch: Mapping[str, int], timeout_s: float
) -> Generator[Any]:
    """Iterate over `batches` with their tensors on `device`; threads of torch_xla read and copy ahead.

    If reading a batch fails, torch_xla ends the epoch silently; here the exception takes the batch's place.

    Args:
        batches: read in a thread of torch_xla.
        device: where their tensors go.
        prefetch: how far to read ahead, by torch_xla's names in `OPTIONS`.
        timeout_s: longest wait for a batch, in seconds.

    Raises:
        UsageError: torch_xla has no option of that name.
        StalledError: a batch did not arrive in time.
        PolyxlaError: batches that were read did not arrive.
    """
    if unknown := sorted(set(prefetch) - set(OPTIONS)):
        raise UsageError(
            f"torch_xla's loader has no option {', '.join(unknown)}",
            where="prefetch",
            fix=f"The options are {', '.join(OPTIONS)}.",
        )
    upload = _Upload(batches, device, prefetch, timeout_s)
    # After an exception, do not wait for the reading thread: it may hang in the user's dataset.
    leave_s = 0.0
    try:
        yield from upload
        leave_s = LEAVE_S
        upload.raise_failure()
    except GeneratorExit:
        leave_s = LEAVE_S
        raise
    finally:
        upload.close(leave_s)


class _Upload:
    """One iteration through torch_xla's loader, whose threads it ends."""

    def __init__(
        self, batches: Generator[Any], device: torch.device, prefetch: Mapping[str, int], timeout_s: float
    ) -> None:
        self._source = _ReadAhead(batches)
        # Use torch_xla's own loader: its options are those that users know.
        loader: Any = MpDeviceLoader(self._source, device, batches_per_execution=NEVER, **prefetch)
        self._arriving = iter(loader)
        # torch_xla's close() first wakes the thread that waits for a batch, then joins the threads that read
        # and copy. It therefore runs in another thread, which the watchdog starts to end a stalled wait, and
        # `close` otherwise.
        self._closing = threading.Thread(
            target=loader._parallel_loader.close, name="polyxla-input", daemon=True
        )
        self._watchdog = InputWatchdog(timeout_s, self._source.line, self._closing.start)

    def __iter__(self) -> Iterator[Any]:
        while (batch := self._next()) is not None:
            self._source.waiting -= 1
            yield batch

    def _next(self) -> Any:
        self._watchdog.begin()
        batch = next(self._arriving, None)
        self._watchdog.end()
        if batch is None and self._watchdog.error:
            raise self._watchdog.error
        return batch

    def raise_failure(self) -> None:
        """Raise what ended the epoch early, in the thread that read or in one that copied."""
        if self._source.failure or self._source.waiting:
            raise self._source.failure or PolyxlaError(LOST)

    def close(self, leave_s: float) -> None:
        """End torch_xla's threads; wait for them `leave_s` seconds at most."""
        self._watchdog.close()
        # The watchdog has ended, so the thread cannot be started twice.
        if not self._watchdog.error:
            self._closing.start()
        self._closing.join(leave_s)


class _ReadAhead:
    """The batches as torch_xla's reading thread iterates over them: an exception ends them and is stored.

    Attributes:
        failure: what ended the batches; None once all have been read.
        waiting: number of batches that were read and have not arrived on the device.
    """

    def __init__(self, batches: Generator[Any]) -> None:
        self._batches = batches
        self._thread: int | None = None
        self.failure: BaseException | None = PolyxlaError(LOST)
        self.waiting = 0

    def __iter__(self) -> Iterator[Any]:
        # `line` needs it: the watchdog asks in which line of the dataset this thread is.
        self._thread = threading.get_ident()
        try:
            for batch in self._batches:
                self.waiting += 1
                yield batch
            self.failure = None
        except BaseException as error:  # torch_xla's thread would drop it.
            self.failure = self.failure if isinstance(error, GeneratorExit) else error
        finally:
            self._batches.close()

    def line(self) -> str | None:
        """Return the user's line that the reading thread is executing; None if it executes none."""
        return callsite.user_line(self._thread) if self._thread is not None else None
