"""Batches on their way to the device, on torch_xla's MpDeviceLoader. Heavy: imported in the replica."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
from torch_xla.distributed.parallel_loader import MpDeviceLoader

from polyxla.errors import UsageError

KNOBS = ("loader_prefetch_size", "device_prefetch_size", "host_to_device_transfer_threads")
"""Batches read ahead on the host (torch_xla's default: 16), batches held on the device (8), and threads that
copy (1; with more, batches may change places).
Source: `torch_xla.distributed.parallel_loader.ParallelLoader` of torch_xla 2.9.0.
"""
NEVER = 2**62
"""Batches per execution: polyxla's loader cuts the graph itself, and only where a step has not."""


def uploaded(batches: Iterator[Any], device: torch.device, prefetch: Mapping[str, int]) -> Generator[Any]:
    """Iterate over `batches` with their tensors on `device`; threads read and copy ahead.

    torch_xla ends an epoch in silence where reading one of its batches fails; here what was raised arrives
    in the place of the batch.

    Raises:
        UsageError: torch_xla does not know one of the words.
    """
    if unknown := sorted(set(prefetch) - set(KNOBS)):
        raise UsageError(
            f"torch_xla's loader has no {', '.join(unknown)}",
            where="prefetch",
            fix=f"It has {', '.join(KNOBS)}.",
        )
    source = _Told(batches)
    loader: Any = MpDeviceLoader(source, device, batches_per_execution=NEVER, **prefetch)
    try:
        yield from loader
        source.raise_failure()
    finally:
        loader._parallel_loader.close()


class _Told:
    """An iterator that ends where it fails, and keeps why."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._failure: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._batches
        except BaseException as error:
            # In torch_xla's thread, where nobody would hear of it.
            self._failure = error

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
