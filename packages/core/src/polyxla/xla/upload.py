"""Batches on their way to the device, on torch_xla's MpDeviceLoader. Heavy: imported in the replica."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
from torch_xla.distributed.parallel_loader import MpDeviceLoader

from polyxla import callsite
from polyxla.errors import UsageError
from polyxla.xla.input_watchdog import Patience

KNOBS = ("loader_prefetch_size", "device_prefetch_size", "host_to_device_transfer_threads")
"""Batches read ahead on the host (torch_xla's default: 16), batches held on the device (8; they are copied
together, so that the first waits for the eighth), and threads that copy (1; with more, batches may change
places).
Source: `torch_xla.distributed.parallel_loader.ParallelLoader` of torch_xla 2.9.0.
"""
LEAVE_S = 60.0
"""How long a loop that is left waits for the thread that reads, in seconds: the next may read the same."""
NEVER = 2**62
"""Batches per execution: polyxla's loader cuts the graph itself, and only where a step has not."""


def uploaded(
    batches: Iterator[Any], device: torch.device, prefetch: Mapping[str, int], timeout_s: float
) -> Generator[Any]:
    """Iterate over `batches` with their tensors on `device`; threads read and copy ahead.

    torch_xla ends an epoch in silence where reading one of its batches fails; here what was raised arrives
    in the place of the batch.

    Args:
        batches: read in a thread of torch_xla.
        device: where their tensors go.
        prefetch: torch_xla's words for how far to read ahead, `KNOBS`.
        timeout_s: the longest wait for a batch, in seconds.

    Raises:
        UsageError: torch_xla does not know one of the words.
        StalledError: no batch came in time.
    """
    if unknown := sorted(set(prefetch) - set(KNOBS)):
        raise UsageError(
            f"torch_xla's loader has no {', '.join(unknown)}",
            where="prefetch",
            fix=f"It has {', '.join(KNOBS)}.",
        )
    source = _Told(batches)
    loader: Any = MpDeviceLoader(source, device, batches_per_execution=NEVER, **prefetch)
    arriving = iter(loader)
    # A thread of its own: it wakes who waits for a batch, and then waits for the threads that read and copy.
    closing = threading.Thread(target=loader._parallel_loader.close, name="polyxla-input", daemon=True)
    patience = Patience(timeout_s, source.line, closing.start)
    # Where it ends otherwise, a thread hangs in the person's dataset, or nobody wants to wait.
    end_s = 0.0
    try:
        while True:
            patience.begin()
            batch = next(arriving, None)
            patience.end()
            if batch is None:
                break
            yield batch
        if patience.error:
            raise patience.error
        end_s = LEAVE_S
        if source.failure:
            raise source.failure
    except GeneratorExit:
        end_s = LEAVE_S
        raise
    finally:
        patience.close()
        if not patience.error:
            closing.start()
        closing.join(end_s)


class _Told:
    """An iterator that ends where it fails, and keeps why.

    Attributes:
        failure: what ended it; None while nothing did.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._thread: int | None = None
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        self._thread = threading.get_ident()
        try:
            yield from self._batches
        except BaseException as error:
            # In torch_xla's thread, where nobody would hear of it.
            self.failure = error

    def line(self) -> str | None:
        """Return the person's line where reading is; None where it is in none."""
        return callsite.user_line_in_thread(self._thread) if self._thread is not None else None
