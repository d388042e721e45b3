"""`polyxla.contracts.counters.Counters` on torch_xla. Heavy: imported in the replica."""

from __future__ import annotations

from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr

from polyxla.contracts.counters import Counters, Counts, Memory

ITEM = "aten::_local_scalar_dense"
"""The operation that reads a scalar; torch_xla counts it as a fallback."""
_S_PER_NS = 1e-9

# Bypasses the wrappers of torch_xla.debug.metrics, because this runs several times per step.
_native: Any = torch_xla._XLAC  # type: ignore[attr-defined]
_value = _native._xla_counter_value


class XlaCounters(Counters):
    """The counters of this process; replicas that are threads of one process share them.

    A counter takes 0.7 us to read (torch_xla 2.9.0). A metric takes up to 0.2 ms, because it comes with its
    last 1024 samples. Reads are therefore counted by the counter ``_to_cpu``, which does not include copies
    of whole tensors (``.cpu()``, ``.tolist()``, ``print``), not by the metric ``TransferFromDeviceTime``.

    Args:
        device: the replica's device.
        cache_counters: names of the counters of hits and misses of the runtime's own persistent cache; None
            if it uses torch_xla's cache only.
    """

    def __init__(self, device: torch.device, cache_counters: tuple[str, str] | None = None) -> None:
        self._device = device
        self._cache_counters = cache_counters
        self._has_memory = True
        # A runtime with a cache of its own emulates its TPUs or drives remote ones.
        if xr.device_type() == "TPU" and cache_counters is None:
            self.chip = str(_native._xla_device_kind(str(device)))

    def counts(self) -> Counts:
        """Read at most eight counters."""
        hits, misses = self._cache()
        compiles = _value("UncachedCompile") or 0
        return Counts(
            compiles=compiles,
            # Not the counter ExecuteComputation, which another thread increments later.
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
        # The runtime's cache is consulted for programs that torch_xla's cache lacks.
        return hits or 0, misses or 0

    def compile_s(self) -> float:
        """Return the total of the metric ``CompileTime``."""
        data = met.metric_data("CompileTime")
        return float(data[1]) * _S_PER_NS if data else 0.0

    def fallbacks(self) -> dict[str, int]:
        """Return the counters ``aten::*``, except the one that counts reads of scalars."""
        return {name: _value(name) for name in met.executed_fallback_ops() if name != ITEM}

    def memory(self) -> Memory | None:
        """Return the statistics of the device's allocator; not every client provides them."""
        if not self._has_memory:
            return None
        try:
            info: dict[str, Any] = dict(xm.get_memory_info(self._device))
        except RuntimeError:
            # XLA's UNIMPLEMENTED, which does not change while the client lives.
            self._has_memory = False
            return None
        return Memory(info["bytes_used"], info["bytes_limit"], info.get("peak_bytes_used"))

    def is_submitted(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor has a buffer, or none on this device."""
        return tensor.device != self._device or not _native._check_tensor_need_materialization([tensor])[0]
