"""`polyxla.plugin.Counters` on TorchTPU. Heavy: imported in the replica."""

from __future__ import annotations

import datetime as dt
import functools
import sys
import threading
from typing import Any

import torch
from torch_tpu._internal.device import _device_ops_backend
from torch_tpu._internal.utils import hardware

from polyxla.plugin import Counters, Counts, Memory

_native: Any = _device_ops_backend
_accelerator: Any = torch.accelerator
_LOOKUPS = "polyxla_bridge.torch_tpu_opener"
_READ, _DEVICE_KEY = "_local_scalar_dense", "PrivateUse1"
"""The operation that reads a scalar, and the dispatch key of TorchTPU's operations."""


class TorchTpuCounters(Counters):
    """The counters of this process.

    TorchTPU counts programs and their compilations, on a TPU as on an emulated one: 0.3 us for each number.
    Another thread compiles and submits them, so the numbers lag behind the program's lines until `settle`.
    TorchTPU counts no reads: the first object of this class in a process wraps the operation that reads a
    scalar, which takes TorchTPU 75 us. Hits and misses are those of an emulated device's cache.
    """

    is_eager = True

    def __init__(self) -> None:
        self._lookups = getattr(sys.modules.get(_LOOKUPS), "lookups", None)
        self._reads = _reads_of_process()
        if self._lookups is None:
            self.chip = hardware.get_tpu_device_name()

    def counts(self) -> Counts:
        """Read TorchTPU's counts of programs, the reads, and the bridge's counts of its cache."""
        hits, misses = self._lookups or (0, 0)
        return Counts(
            compiles=_native._get_cache_misses(),
            executions=_native._get_cache_requests(),
            host_reads=self._reads.count,
            cache_hits=hits,
            cache_misses=misses,
        )

    def settle(self) -> None:
        """Wait for the device: TorchTPU cannot wait for its own threads alone."""
        _accelerator.synchronize()

    def compile_s(self) -> float:
        """Return the sum of the compilations' times; several programs may compile at the same time.

        With several processes, TorchTPU records most of them as 0.
        """
        entries = _native._get_cache_stats().per_entry_stats
        # In whole microseconds: the order of the entries changes, and sums of floats with it.
        return sum((entry.compilation_duration for entry in entries), dt.timedelta()).total_seconds()

    def fallbacks(self) -> dict[str, int]:
        """Return nothing: TorchTPU refuses an operation that it lacks, with a sentence."""
        return {}

    def memory(self) -> Memory | None:
        """Return the statistics of the device's allocator."""
        free, total = _accelerator.get_memory_info()
        return Memory(total - free, total)


class TorchTpuProbe:
    """The `polyxla.tpu.monitor.replica_watch.DeviceProbe` of this process's device.

    TorchTPU ends with the main thread, and aborts a process that asks it for something afterwards.
    """

    def __init__(self) -> None:
        self._requests = 0

    def ended(self) -> int:
        """Return how many programs were submitted; TorchTPU does not count those that have ended."""
        if threading.main_thread().is_alive():
            self._requests = int(_native._get_cache_requests())
        return self._requests

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if threading.main_thread().is_alive():
            _accelerator.synchronize()


class _ReadTimes:
    """Wraps the operation that reads a scalar, as long as it lives.

    Attributes:
        count: number of scalars that this process read.
    """

    def __init__(self) -> None:
        self.count = 0
        self._kernel = torch.library.get_kernel(f"aten::{_READ}", _DEVICE_KEY)
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl(_READ, self._read, _DEVICE_KEY, with_keyset=True)

    def _read(self, keys: Any, tensor: torch.Tensor) -> Any:
        self.count += 1
        return self._kernel.call_boxed(keys, tensor)


# It is made once in a process: a second wrapper would go around the first.
_reads_of_process = functools.cache(_ReadTimes)
