"""`polyxla.contracts.counters.Counters` on TorchTPU. Heavy: imported in the replica."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch_tpu._internal.device import _device_ops_backend
from torch_tpu._internal.utils import hardware

from polyxla.contracts.counters import Counters, Counts, Memory

_native: Any = _device_ops_backend
_accelerator: Any = torch.accelerator
_LOOKUPS = "polyxla_bridge.torch_tpu_opener"


class TorchTpuCounters(Counters):
    """The counters of this process."""

    def __init__(self) -> None:
        self._lookups = getattr(sys.modules.get(_LOOKUPS), "lookups", None)
        if self._lookups is None:
            self.chip = hardware.get_tpu_device_name()

    def counts(self) -> Counts:
        """Read TorchTPU's counts of programs, and the bridge's of its cache."""
        hits, misses = self._lookups or (0, 0)
        return Counts(
            compiles=_native._get_cache_misses(),
            executions=_native._get_cache_requests(),
            cache_hits=hits,
            cache_misses=misses,
        )

    def compile_s(self) -> float:
        """Return the total time of TorchTPU's compilations."""
        return 0.0

    def fallbacks(self) -> dict[str, int]:
        """Return nothing: TorchTPU refuses an operation that it lacks, with a sentence."""
        return {}

    def memory(self) -> Memory | None:
        """Return the statistics of the device's allocator."""
        free, total = _accelerator.get_memory_info()
        return Memory(total - free, total)
