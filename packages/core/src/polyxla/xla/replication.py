"""A replica on torch_xla: the setup of its process, its `Replication` and its `Counters`.

Heavy: imported in replica processes, and in the fork server that makes them.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from torch_xla.debug import profiler

from polyxla import env
from polyxla.contracts.replication import STEP_EVENT, Counters, Counts, Memory, ReduceOp, Replication
from polyxla.errors import UsageError
from polyxla.xla.optimizer_factors import FactorTensors, factors_as_inputs
from polyxla.xla.program_checks import UnsyncedCollectives
from polyxla.xla.upload import upload_batches

ITEM = "aten::_local_scalar_dense"
"""The operation that reads a scalar; torch_xla counts it as a fallback."""
_S_PER_NS = 1e-9

# Bypasses the wrappers of torch_xla.debug.metrics, because this runs several times per step.
_native: Any = torch_xla._XLAC  # type: ignore[attr-defined]
_value = _native._xla_counter_value


SWITCH_INTERVAL_S = 1e-4
"""Longest time for which a thread keeps the GIL while others wait, in seconds. Every call of the bridge needs
the GIL for some microseconds; with Python's default of 5 ms it would wait for the other replicas' tracing."""
BUCKET_SIZE_MB = "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"
"""torch_xla's variable for the size of gradients that share a collective; default: all of them.
Source: ``xm.reduce_gradients`` of torch_xla 2.9.0.
"""


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


def prepare_process(shares_gil: bool) -> None:
    """Prepare this process, whose threads may share the GIL all the time. Call it before a device is used."""
    # A fork of the launching process has lost the registration; any other process must not have it twice.
    atexit.unregister(torch_xla._prepare_to_exit)
    atexit.register(torch_xla._prepare_to_exit)
    # torch_xla calls its own deprecated functions, which ends a launch where warnings are errors. A program
    # that calls them still gets the warning.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch_xla\.")
    if shares_gil:
        sys.setswitchinterval(SWITCH_INTERVAL_S)


def use_device(thread: int, threads: int) -> None:
    """Make a device the calling thread's default, which determines ordinals and random numbers.

    Args:
        thread: the replica's number within its process, which is also its device's.
        threads: number of replicas of the process; a single replica runs in the main thread.
    """
    device = torch_xla.device(thread)
    torch_xla._XLAC._xla_set_default_device(str(device))  # type: ignore[attr-defined]
    # torch.compile's programs read the world size and the ordinal, and cannot ask the device.
    xr._init_world_size_ordinal()
    if threads > 1:
        # The backward pass must run in the replica's thread, too: torch.distributed's state, which gradient
        # hooks use, belongs to a thread.
        torch.autograd.set_multithreading_enabled(False)


_OPS = {
    "sum": xm.REDUCE_SUM,
    "mean": xm.REDUCE_SUM,
    "min": xm.REDUCE_MIN,
    "max": xm.REDUCE_MAX,
    "mul": xm.REDUCE_MUL,
    "and": xm.REDUCE_AND,
    "or": xm.REDUCE_OR,
}


class XlaReplication(Replication):
    """The part of a replica on torch_xla that all runtimes share; subclasses add the collectives.

    Args:
        kind: the device type that this process must run on, ``CPU`` or ``TPU``.
        local_index: the device's number among the devices that this process sees.
        environ: the job's environment, which is read here and not while training: torch_xla's threads change
            the process's own at any time.

    Raises:
        UsageError: torch_xla already runs in this process, on other devices, or a timeout is invalid.
    """

    cache_counters: tuple[str, str] | None = None
    """Names of the counters of the runtime's own persistent cache; see `XlaCounters`."""

    def __init__(self, kind: str, local_index: int, environ: Mapping[str, str]) -> None:
        self._factors = FactorTensors(self._upload)
        self._input_timeout_s = env.timeout_s(environ, env.POLYXLA_INPUT_TIMEOUT_S)
        # Before torch_xla.device(), whose own range check is off by one.
        if local_index >= torch_xla.device_count():
            raise UsageError(
                f"device {local_index} is not among the {torch_xla.device_count()} that torch_xla already "
                "runs with in this process",
                where="devices",
                fix="Launch with start_method='spawn', which starts a fresh process.",
            )
        self.device = torch_xla.device(local_index)
        self.kind = xm.xla_device_hw(self.device)
        if self.kind != kind:
            raise UsageError(
                f"torch_xla already runs on {self.kind} in this process, and cannot change to {kind}",
                where=f"a replica of kind {kind}",
                fix="Launch with start_method='spawn', which starts a fresh process.",
            )

    def optimizer_context(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Keep factors that become 1 inputs of the program."""
        return factors_as_inputs(optimizer, self._factors)

    def _upload(self, tensor: torch.Tensor) -> torch.Tensor:
        # Not .to(device), which would make a constant of a tensor that holds 1.
        uploaded: Any = xm.send_cpu_data_to_device(tensor, self.device)
        return cast("torch.Tensor", uploaded[0])

    def sync(self, wait: bool = False) -> None:
        """Cut the graph here and submit it to the device."""
        torch_xla.sync(wait=wait)
        if wait:
            # torch_xla's own wait ends when the graph is submitted.
            self._wait()

    def seed(self, seed: int) -> None:
        """Seed the device's generator, which torch.manual_seed does not."""
        xm.set_rng_state(seed, str(self.device))

    def rng_state(self) -> int:
        """Return the generator's seed for the next program; this does not cut the graph."""
        state: int = xm.get_rng_state(str(self.device))
        return state

    def upload(self, batches: Generator[Any], prefetch: Mapping[str, int]) -> Generator[Any]:
        """Iterate over `batches`, which torch_xla's threads copy ahead."""
        return upload_batches(batches, self.device, prefetch, self._input_timeout_s)

    def counters(self) -> XlaCounters:
        """Return torch_xla's counters."""
        return XlaCounters(self.device, self.cache_counters)

    @contextlib.contextmanager
    def profile(self, folder: str) -> Iterator[Callable[[int], None]]:
        """Trace the device's work into files for TensorBoard and Perfetto."""
        profiler.start_trace(folder)
        step = contextlib.ExitStack()

        def begin_step(number: int) -> None:
            step.close()
            # Not profiler.StepTrace: it also names the operations of the step, and submits it at its end.
            step.enter_context(_native.profiler.TraceMe(STEP_EVENT, step_num=number, _r=1))

        try:
            yield begin_step
        finally:
            step.close()
            profiler.stop_trace()

    def report(self) -> str:
        """Return torch_xla's metrics report."""
        report: str = met.metrics_report()
        return report

    def close(self) -> None:
        """Wait until the device has finished the submitted work."""
        self._wait()

    def _wait(self) -> None:
        # For this device only: waiting takes a device's lock, and another replica may be using its device.
        xm.wait_device_ops(xm.xla_real_devices([self.device]))


class CollectiveReplication(XlaReplication):
    """One of several replicas, with torch_xla's collectives; subclasses add the world and the rendezvous."""

    def __init__(self, kind: str, local_index: int, environ: Mapping[str, str]) -> None:
        super().__init__(kind, local_index, environ)
        self._unsynced = UnsyncedCollectives()
        self._bucket_mb = int(environ.get(BUCKET_SIZE_MB) or 0)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Combine the replicas' tensors in the program of the current step."""
        self._unsynced.called()
        # XLA has no mean: the sum is scaled in the same program.
        scale = 1.0 / self.world.world_size if op == "mean" else 1.0
        return cast("torch.Tensor", xm.all_reduce(_OPS[op], tensor, scale=scale))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Gather the replicas' tensors in the program of the current step."""
        self._unsynced.called()
        return list(xm.all_gather(tensor[None]).unbind())

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Average the replicas' tensors in place, in the program of the current step."""
        scale = 1.0 / self.world.world_size
        if self._bucket_mb:
            # The last layers' gradients are ready first.
            xm.all_reduce_bucketized_gradients([*tensors[::-1]], scale, None, True, self._bucket_mb)
        else:
            xm.all_reduce(xm.REDUCE_SUM, list(tensors), scale=scale)
