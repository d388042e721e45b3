"""torch_xla's counters as a `polyxla.contracts.counters.Counters`. Heavy: imported in the replica."""

from __future__ import annotations

from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from torch_xla._internal.tpu import TpuPlugin
from torch_xla.experimental import plugins

from polyxla.contracts.counters import Counters, Counts, Memory

ITEM = "aten::_local_scalar_dense"
"""What reads a scalar; torch_xla counts it among the operations that fell back."""
_S_PER_NS = 1e-9

# Without the wrappers of torch_xla.debug.metrics: this runs several times a step.
_native: Any = torch_xla._XLAC  # type: ignore[attr-defined]
_value = _native._xla_counter_value


class XlaCounters(Counters):
    """Counts of this process, which replicas that are threads share.

    Counters take 0.7 us each (torch_xla 2.9.0). Metrics are slower, up to 0.2 ms, because a metric is only to
    be had with its last 1024 samples: so reads are counted by ``_to_cpu``, which whole tensors' copies
    (``.cpu()``, ``.tolist()``, ``print``) pass by, and not by ``TransferFromDeviceTime``.

    Args:
        device: the replica's.
        cache_counters: names of the counters of hits and misses of a persistent cache of the runtime's own;
            None where it has none beside torch_xla's.
    """

    def __init__(self, device: torch.device, cache_counters: tuple[str, str] | None = None) -> None:
        self._device = device
        self._cache_counters = cache_counters
        self._has_memory = True
        # A device that plays a TPU, or stands for one elsewhere, is called one, but is another plugin's.
        if xr.device_type() == "TPU" and isinstance(plugins.default(), TpuPlugin):
            self.chip = str(_native._xla_device_kind(str(device)))

    def counts(self) -> Counts:
        """Read at most eight counters."""
        hits, misses = self._cache()
        compiles = _value("UncachedCompile") or 0
        return Counts(
            compiles=compiles,
            # Not ExecuteComputation, which counts in another thread, some time later.
            executions=compiles + (_value("CachedCompile") or 0),
            host_reads=_value("xla::_to_cpu") or 0,
            cache_hits=hits,
            cache_misses=misses,
        )

    def _cache(self) -> tuple[int, int]:
        hits, misses = map(_value, self._cache_counters or ("", ""))
        if hits is None and misses is None:
            failed = _value("PersistentCacheDeserializeFailure") or 0
            return _value("PersistentCacheHit") or 0, (_value("PersistentCacheMiss") or 0) + failed
        # The runtime's own cache is asked for what torch_xla's has missed.
        return hits or 0, misses or 0

    def compile_s(self) -> float:
        """Return what the metric ``CompileTime`` adds up to."""
        data = met.metric_data("CompileTime")
        return float(data[1]) * _S_PER_NS if data else 0.0

    def fallbacks(self) -> dict[str, int]:
        """Return the counters ``aten::*`` but for the one that reads a scalar."""
        return {name: _value(name) for name in met.executed_fallback_ops() if name != ITEM}

    def memory(self) -> Memory | None:
        """Return what the device's allocator says; not every client has one that speaks."""
        if not self._has_memory:
            return None
        try:
            told: dict[str, Any] = dict(xm.get_memory_info(self._device))
        except RuntimeError:
            # XLA's UNIMPLEMENTED, which stays so.
            self._has_memory = False
            return None
        return Memory(told["bytes_used"], told["bytes_limit"], told.get("peak_bytes_used"))
