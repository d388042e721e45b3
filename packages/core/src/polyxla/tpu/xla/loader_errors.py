"""Errors of a dataset that torch_xla's loader reads ahead: torch_xla ends the epoch without a word.

Heavy: imported by the plugins that torch_xla imports.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Iterable, Iterator
from typing import Any

from torch_xla.distributed.parallel_loader import ParallelLoader


class _Reported:
    """A loader whose exception ends the iteration, and is raised where the loop waits for the batch.

    Args:
        loader: what torch_xla reads in a thread.
        errors: what torch_xla's iterator raises once no batch is left.
    """

    def __init__(self, loader: Iterable[Any], errors: queue.Queue[BaseException]) -> None:
        self._loader, self._errors = loader, errors

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._loader
        except GeneratorExit:
            # The loop was left.
            raise
        except BaseException as error:
            # Before the iteration ends: the loop then looks for it.
            self._errors.put(error)


@functools.cache
def raise_in_loop() -> None:
    """Make a loop over ``MpDeviceLoader`` or ``ParallelLoader`` raise what ended its dataset, from now on."""
    read: Any = ParallelLoader._loader_worker

    @functools.wraps(read)
    def loader_worker(self: Any) -> None:
        self._cpu_loader = _Reported(self._cpu_loader, self._exception_queue)
        read(self)

    ParallelLoader._loader_worker = loader_worker  # type: ignore[method-assign]
