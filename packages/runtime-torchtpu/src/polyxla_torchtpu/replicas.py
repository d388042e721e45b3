"""The replica of a process. Heavy: imported in the replicas' processes, or in their fork server."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import io
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
import torch_tpu  # noqa: F401 -- what takes long to import is imported here, in the fork server
from torch.nn import functional as F

from polyxla import UsageError
from polyxla.plugin import (
    POLYXLA_INPUT_TIMEOUT_S,
    POLYXLA_START_TIMEOUT_S,
    ReduceOp,
    Replication,
    World,
    average_in_place,
    end_with_parent,
    failures,
    presence,
    sigterm_ends_quietly,
    snapshot,
    timeout_s,
    torchrun,
    update_environ,
    watch_replicas,
)
from polyxla.plugin import tpu_env as tpu
from polyxla_torchtpu import env, host_answers
from polyxla_torchtpu.counters import TorchTpuCounters, TorchTpuProbe
from polyxla_torchtpu.plan import Place, TorchTpuPlan
from polyxla_torchtpu.profiling import profile
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
_EXPERIMENTAL = r"<TorchTpu/ApiStage/ExperimentalApi/> (the TORCH_TPU_|'default_generators')"
"""How TorchTPU warns of what may change in later versions."""
BACKEND = "tpu_dist"
"""TorchTPU's name of its process groups."""


def prepare(plan: TorchTpuPlan) -> None:
    """Prepare this process for its replica, before the device is opened."""
    environ = snapshot()
    if torchrun.process_count(environ) is None:
        end_with_parent()
    if plan.emulated:
        _watch()
    watch_replicas(environ, TorchTpuProbe)


def _watch() -> None:
    from polyxla_bridge.engine import stall_watchdog

    stall_watchdog.on_stall(failures.report_stall)
    failures.describe_with(stall_watchdog.describe_here)
    # A TPU numbers its devices by coordinates, TorchTPU its replicas by process: one in each.
    presence.listen(lambda position: stall_watchdog.retire_here() if position.has_returned else None)


def load() -> None:
    """Load TorchTPU in this process without what it prints when all is well."""
    # Of variables and functions that this runtime uses itself.
    warnings.filterwarnings("ignore", message=_EXPERIMENTAL)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            host_answers.load(snapshot())
            _mend()
    except BaseException:
        sys.stderr.write(said.getvalue())
        raise


def _mend() -> None:
    """Do what TorchTPU 0.2.0 leaves undone, as docs/torchtpu.md lists it. A second call does nothing."""
    any_torch: Any = torch
    # torch.utils.checkpoint keeps a device's random numbers only if this says that it is in use. Otherwise
    # the backward pass draws other masks of dropout than the forward pass.
    any_torch.tpu._initialized = True
    if F.batch_norm is not _batch_norm:
        F.batch_norm = _batch_norm


_torchs_batch_norm = F.batch_norm


def _batch_norm(
    input: torch.Tensor,  # noqa: A002  (torch's name)
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Normalise as torch does, and move the running statistics, which TorchTPU leaves as they are."""
    moves = training and input.device.type == "tpu" and running_mean is not None and running_var is not None
    if not moves:
        return _torchs_batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    result = _torchs_batch_norm(input, None, None, weight, bias, training, momentum, eps)
    with torch.no_grad():
        others = [dimension for dimension in range(input.dim()) if dimension != 1]
        variance, mean = torch.var_mean(input.detach().float(), others)
        for running, current in ((running_mean, mean), (running_var, variance)):
            assert running is not None
            running.mul_(1 - momentum).add_(current.to(running.dtype), alpha=momentum)
    return result


def open_replication(place: Place, environ: Mapping[str, str], is_program: bool = False) -> Replication:
    """Open this process's device, and meet the other replicas.

    Args:
        place: of this process's replica.
        environ: the job's environment, with the timeouts.
        is_program: whether the replica runs a whole program, which may make the process group itself.
    """
    load()
    # The launch has switched it off for this process, not for the programs that this process starts.
    own = {env.TORCH_DEVICE_BACKEND_AUTOLOAD: environ.get(env.TORCH_DEVICE_BACKEND_AUTOLOAD, "1")}
    update_environ(own)
    if place.plan.layout.replicas == 1:
        return TorchTpuReplication(World(), place.plan.kind, environ)
    world = place.plan.layout.world(place.process, 0)
    with sigterm_ends_quietly():
        replication = SeveralReplication(world, place.plan.kind, environ)
    if not is_program:
        replication.join_group()
    return replication


class TorchTpuReplication(Replication):
    """The only replica of its job: every collective is the identity."""

    def __init__(self, world: World, kind: str, environ: Mapping[str, str]) -> None:
        self.world = world
        self.kind = kind
        self._input_timeout_s = timeout_s(environ, POLYXLA_INPUT_TIMEOUT_S)
        self.device = torch.device("tpu", 0)
        # The device is opened here, not at the first step.
        torch.zeros((), device=self.device).cpu()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Return the one replica's tensor."""
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the one replica's tensor."""
        return [tensor]

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leave the tensors as they are: the mean over one replica."""

    def rendezvous(self, tag: str, payload: bytes, replicas: Sequence[int] = ()) -> list[bytes]:
        """Return the only payload."""
        if any(ordinal != 0 for ordinal in replicas):
            raise ValueError(f"rendezvous {tag!r}: replicas={list(replicas)}, but there is only ordinal 0")
        return [payload]

    def sync(self, wait: bool = False) -> None:
        """Work is submitted at once; with `wait`, block until it is done."""
        if wait:
            torch.accelerator.synchronize()

    def seed(self, seed: int) -> None:
        """Seed the device's generator, or restore it to a state of `rng_state`."""
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
        return profile(folder)

    def report(self) -> str:
        """Return the counts of programs and reads."""
        counts = self.counters().counts()
        return "\n".join(f"{name}: {value}" for name, value in counts._asdict().items())

    def close(self) -> None:
        """Wait until the device has finished the submitted work."""
        torch.accelerator.synchronize()


class SeveralReplication(TorchTpuReplication):
    """One of several replicas, in a process group of TorchTPU.

    Args:
        world: this replica's numbers.
        kind: the name of the devices.
        environ: the job's environment, with the timeouts.
    """

    def __init__(self, world: World, kind: str, environ: Mapping[str, str]) -> None:
        self._start_timeout_s = timeout_s(environ, POLYXLA_START_TIMEOUT_S)
        self._owns_group = False
        super().__init__(world, kind, environ)

    def join_group(self) -> None:
        """Make the process group of all replicas, unless the program has made it, as under torchrun."""
        if dist.is_initialized():
            return
        self._owns_group = True
        start = dt.timedelta(seconds=self._start_timeout_s)
        own, world = snapshot(), self.world
        is_host = world.ordinal == 0 and torchrun.process_count(own) is None
        address, port = own[tpu.MASTER_ADDR], int(own[tpu.MASTER_PORT])
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
        if replicas and sorted(replicas) != list(range(self.world.world_size)):
            raise UsageError(
                f"rendezvous {tag!r} of replicas {list(replicas)} out of {self.world.world_size}",
                where="replicas",
                fix="Leave replicas out: all of them must take part.",
            )
        sizes = [int(size) for size in self.all_gather(torch.tensor(len(payload)).to(self.device))]
        if not any(sizes):
            return [b""] * len(sizes)
        # Each new size compiles a program.
        padded = payload.ljust(1 << (max(sizes) - 1).bit_length(), b"\0")
        data = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(self.device)
        gathered = (bytes(one.cpu().numpy().tobytes()) for one in self.all_gather(data))
        return [one[:size] for one, size in zip(gathered, sizes, strict=True)]

    def close(self) -> None:
        """Wait until the device has finished the submitted work, and leave the group."""
        super().close()
        if self._owns_group:
            # TorchTPU would wait for the other replicas when this process ends, also after a failure.
            dist.destroy_process_group()
