"""The replica of a process: its replication, and the process around it.

Heavy: imported in the replicas' processes, or in the fork server that forks them.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
import torch_tpu  # noqa: F401 -- what takes long to import is imported here, in the fork server
from torch_tpu._internal.profiler import _impl, _profiler_backend

from polyxla.plugin import (
    POLYXLA_INPUT_TIMEOUT_S,
    POLYXLA_START_TIMEOUT_S,
    STEP_EVENT,
    OnlyReplica,
    ReduceOp,
    Replication,
    World,
    average_in_place,
    end_with_parent,
    padded,
    report_stalls,
    require_all,
    sigterm_ends_quietly,
    snapshot,
    timeout_s,
    torchrun,
    tpu_env,
    update_environ,
    watch_replicas,
)
from polyxla_torchtpu import env
from polyxla_torchtpu.counters import TorchTpuCounters, TorchTpuProbe
from polyxla_torchtpu.framework import BACKEND, load_in_replica
from polyxla_torchtpu.plan import TorchTpuPlace, TorchTpuPlan
from polyxla_torchtpu.upload import upload_batches

_RNG_STATE_BYTES = 16
"""A generator's state: seed and offset, eight bytes each. Source: torch_tpu 0.2.0, measured."""
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "mul": dist.ReduceOp.PRODUCT,
}
_SHOW_OPERATIONS = "_ZN9torch_tpu20XProfCallbackHandler8RegisterEv"
"""Source: torch_tpu 0.2.0, whose torch.profiler calls it too, and then records every event twice."""


def prepare(plan: TorchTpuPlan) -> None:
    """Prepare this process for its replica, before the device is opened."""
    environ = snapshot()
    # torchrun itself ends its processes; ours end with the launching process, however that ends.
    if torchrun.process_count(environ) is None:
        end_with_parent()
    if plan.emulated:
        from polyxla_bridge.engine import stall_watchdog

        # A TPU numbers its devices by coordinates, TorchTPU its replicas by process: one in each.
        report_stalls(stall_watchdog, lambda _: stall_watchdog.retire_here())
    watch_replicas(environ, TorchTpuProbe)


def open_replication(
    place: TorchTpuPlace, environ: Mapping[str, str], is_program: bool = False
) -> Replication:
    """Open this process's device, and meet the other replicas.

    Args:
        place: of this process's replica.
        environ: the job's environment, with the timeouts.
        is_program: whether the replica runs a whole program, which may make the process group itself.
    """
    load_in_replica()
    # The launch has switched it off for this process, not for the programs that this process starts.
    own = {env.TORCH_DEVICE_BACKEND_AUTOLOAD: environ.get(env.TORCH_DEVICE_BACKEND_AUTOLOAD, "1")}
    update_environ(own)
    if place.plan.layout.replicas == 1:
        single = SingleReplication(place.plan.kind, environ)
        single.open_device()
        return single
    world = place.plan.layout.world(place.process, 0)
    replication = MultiReplication(world, place.plan.kind, environ)
    # TorchTPU counts all devices of the host until one is open, and one from then on; a program for torchrun
    # asks for several. It may also call init_process_group itself, and torch allows only one; without that,
    # the first collective makes the group.
    if not is_program:
        with sigterm_ends_quietly():
            replication.open_device()
        replication.join_group()
    return replication


class TorchTpuReplication(Replication):
    """What the only replica of a job and one of several share; subclasses add the collectives.

    Args:
        kind: the name of the devices.
        environ: the job's environment, with the timeouts.
    """

    def __init__(self, kind: str, environ: Mapping[str, str]) -> None:
        self.kind = kind
        self._input_timeout_s = timeout_s(environ, POLYXLA_INPUT_TIMEOUT_S)
        self.device = torch.device("tpu", 0)

    def open_device(self) -> None:
        """Open the device now, not at the first step."""
        torch.zeros((), device=self.device).cpu()

    def sync(self, wait: bool = False) -> None:
        """Work is submitted at once; with `wait`, block until it is done."""
        if wait:
            torch.accelerator.synchronize()

    def seed(self, seed: int) -> None:
        """Seed the device's generator, or restore it to a state of `rng_state`."""
        # The offset is in the upper half, so a plain seed starts at offset 0.
        state = torch.frombuffer(bytearray(seed.to_bytes(_RNG_STATE_BYTES, "little")), dtype=torch.uint8)
        self._generator.set_state(state)

    def rng_state(self) -> int:
        """Return the generator's seed and offset in one number."""
        return int.from_bytes(bytes(self._generator.get_state().tolist()), "little")

    @property
    def _generator(self) -> torch.Generator:
        module: Any = torch.tpu  # type: ignore[attr-defined]
        return cast("torch.Generator", module.default_generators[0])

    def upload(self, batches: Generator[Any], prefetch: Mapping[str, int]) -> Generator[Any]:
        """Iterate over `batches`, which a thread copies ahead."""
        return upload_batches(batches, self.to_device, prefetch, self._input_timeout_s)

    def counters(self) -> TorchTpuCounters:
        """Return TorchTPU's counters."""
        return TorchTpuCounters()

    def profile(self, folder: str) -> AbstractContextManager[Callable[[int], None]]:
        """Trace torch's operations and the device's work into files for TensorBoard and Perfetto."""
        return _profile(folder)

    def report(self) -> str:
        """Return the counts of programs and reads."""
        counts = self.counters().counts()
        return "\n".join(f"{name}: {value}" for name, value in counts._asdict().items())

    def close(self) -> None:
        """Wait until the device has finished the submitted work, if it was opened."""
        if torch.tpu.is_initialized():  # type: ignore[attr-defined]
            torch.accelerator.synchronize()


@contextlib.contextmanager
def _profile(folder: str) -> Iterator[Callable[[int], None]]:
    """Trace torch's operations and the device's work."""
    # TorchTPU's own trace is without torch's operations, and so without the marks of the steps.
    getattr(ctypes.PyDLL(_profiler_backend.__file__), _SHOW_OPERATIONS)()
    _impl.start_trace(folder)
    step = contextlib.ExitStack()

    def begin_step(number: int) -> None:
        step.close()
        # The stats are part of the name. Source: TraceMeEncode in tsl/profiler/lib/traceme_encode.h.
        name = f"{STEP_EVENT}#step_num={number},_r=1#"
        step.enter_context(torch.profiler.record_function(name))

    try:
        yield begin_step
    finally:
        step.close()
        _impl.stop_trace()


class SingleReplication(OnlyReplica, TorchTpuReplication):
    """The replication of a job's only replica."""


class MultiReplication(TorchTpuReplication):
    """One of several replicas, in a process group of TorchTPU.

    Args:
        world: this replica's numbers.
        kind: the name of the devices.
        environ: the job's environment, with the timeouts.
    """

    def __init__(self, world: World, kind: str, environ: Mapping[str, str]) -> None:
        self._start_timeout_s = timeout_s(environ, POLYXLA_START_TIMEOUT_S)
        self._owns_group = False
        self.world = world
        super().__init__(kind, environ)

    def join_group(self) -> None:
        """Make the process group of all replicas, unless the program has made it, as under torchrun."""
        # Only a group that was made here is destroyed at the end: the program's own is the program's.
        if dist.is_initialized():
            return
        self._owns_group = True
        start = dt.timedelta(seconds=self._start_timeout_s)
        own, world = snapshot(), self.world
        # torchrun hosts the store itself; a second server on its port would fail.
        is_host = world.ordinal == 0 and torchrun.process_count(own) is None
        address, port = own[tpu_env.MASTER_ADDR], int(own[tpu_env.MASTER_PORT])
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, world.world_size, is_host, start
        )
        dist.init_process_group(
            BACKEND, store=store, rank=world.ordinal, world_size=world.world_size, timeout=start
        )

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Combine the replicas' tensors; collectives of TorchTPU work in place, on a copy here."""
        if op in ("and", "or"):
            return self._combine_bits(tensor, op)
        self.join_group()
        result = tensor.detach().clone()
        dist.all_reduce(result, _OPS[op])
        return result / self.world.world_size if op == "mean" else result

    def _combine_bits(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        # XLA reduces bits of bool only, and on a TPU of 32-bit integers.
        combine = torch.bitwise_and if op == "and" else torch.bitwise_or
        return functools.reduce(combine, self.all_gather(tensor))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Gather the replicas' tensors."""
        self.join_group()
        source = tensor.detach().contiguous()
        # The collective joins the tensors along their first dimension, so each gets one of size 1.
        gathered = source.new_empty((self.world.world_size, *source.shape))
        dist.all_gather_into_tensor(gathered, source[None])
        return list(gathered.unbind())

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Average the replicas' tensors in place, many of one dtype in one collective."""
        self.join_group()
        average_in_place(tensors, dist.all_reduce, self.world.world_size)

    def rendezvous(self, tag: str, payload: bytes, replicas: Sequence[int] = ()) -> list[bytes]:
        """Exchange payloads by gathering their sizes, then their bytes.

        Raises:
            UsageError: `replicas` names only some of the replicas.
        """
        require_all(tag, replicas, self.world.world_size)
        # The sizes come first: tensors that are gathered must have the same shape in all replicas.
        sizes = [int(size) for size in self.all_gather(torch.tensor(len(payload)).to(self.device))]
        # A barrier: the exchange of the sizes was the meeting.
        if not any(sizes):
            return [b""] * len(sizes)
        data = torch.frombuffer(bytearray(padded(payload, max(sizes))), dtype=torch.uint8).to(self.device)
        gathered = (tensor.cpu().numpy().tobytes() for tensor in self.all_gather(data))
        return [received[:size] for received, size in zip(gathered, sizes, strict=True)]

    def close(self) -> None:
        """Wait until the device has finished the submitted work, and leave the group."""
        super().close()
        if self._owns_group:
            # TorchTPU would wait for the other replicas when this process ends, also after a failure.
            dist.destroy_process_group()
