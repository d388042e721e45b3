"""The plan of a job: its chips, and the variables of TorchTPU's launch for each process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from polyxla import UsageError
from polyxla.plugin import (
    GENERATIONS,
    LOCALHOST,
    ONE,
    POLYXLA_EMULATE_NUMERICS,
    AcceleratorType,
    Bounds,
    ChipPlan,
    EmulatedTpu,
    Layout,
    Place,
    TpuSlice,
    free_ports,
    join,
    plan_chips,
    say_once,
    snapshot,
    this_slice,
    torchrun,
    tpu_env,
)
from polyxla_torchtpu import env

BASE_PORT = 8070
"""The port of a host's first process in a slice of several hosts.
Source: ``set_tpu_launch_env`` of torch_tpu 0.2.0.
"""
STORE_PORT = 29500
"""The port of torch.distributed's store in such a slice. Source: as for `BASE_PORT`."""
CPU_GENERATION = "v5e"
"""What the chips are called that this machine's CPU emulates where no TPU was asked for."""
_EMULATED = {tpu_env.TPU_SKIP_MDS_QUERY: "1", env.TF_CPP_MIN_LOG_LEVEL: "2"}
NEVER_OVERWRITTEN = (
    env.TORCH_TPU_TOPOLOGY,
    env.TORCH_TPU_SLICEBUILDER_ADDRESSES,
    env.TORCH_TPU_XPROF_SESSION_ID,
)
"""Variables that keep the value that a user has set, as in TorchTPU's own launch."""


@dataclass(frozen=True)
class TorchTpuPlan(ChipPlan):
    """Where the replicas of a job run: one process for each device.

    Attributes:
        is_cpu: whether the TPU is emulated because no other device is here, and nobody asked for one.
    """

    is_cpu: bool = False

    @property
    def kind(self) -> str:
        """The name of the devices."""
        return "CPU" if self.is_cpu else "TPU"

    @property
    def launching_hosts(self) -> tuple[str, ...]:
        """The hosts whose launches monitor each other; none for CPU replicas, which the bridge monitors."""
        return () if self.is_cpu else super().launching_hosts

    @property
    def topology(self) -> str:
        """The arrangement of the job's chips, as TorchTPU writes it: with the devices of a chip on tpu7x."""
        devices = GENERATIONS[self.tpu_slice.accelerator.generation].devices_per_chip
        return join((*self.tpu_slice.bounds.chips, *([devices] if devices > 1 else [])))

    def say(self) -> None:
        """Print once that the TPU is emulated, if it is."""
        if self.is_cpu:
            count = self.layout.replicas
            replicas = "1 replica" if count == 1 else f"{count} replicas"
            whose = "names are a TPU's, numbers the CPU's"
            if snapshot().get(POLYXLA_EMULATE_NUMERICS):
                whose = "names and products of float32 are a TPU's, other numbers the CPU's"
            say_once(f"no TPU is here: the CPU emulates {replicas}; {whose}")
        else:
            super().say()

    def meeting(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Choose what all processes share, such as where they meet: variables over `environ`."""
        has_others = self.layout.hosts > 1 and not self.emulates_all_hosts
        shared = {env.TORCH_TPU_TOPOLOGY: self.topology, env.TORCH_TPU_XPROF_SESSION_ID: str(time.time_ns())}
        if has_others:
            # The other hosts launch by themselves: fixed ports and the first host's name are all that each
            # can know.
            first = int(environ.get(env.TORCH_TPU_BASE_PORT) or BASE_PORT)
            store = {
                tpu_env.MASTER_ADDR: environ.get(tpu_env.MASTER_ADDR) or self.launching_hosts[0],
                tpu_env.MASTER_PORT: environ.get(tpu_env.MASTER_PORT) or str(STORE_PORT),
            }
            ports = [str(first + local) for local in range(self.layout.processes)]
        else:
            *free, own = (str(port) for port in free_ports(self.layout.processes + 1))
            store, ports = {tpu_env.MASTER_ADDR: LOCALHOST, tpu_env.MASTER_PORT: own}, free
        shared |= self.emulated_meeting(environ) | store
        shared[env.TORCH_TPU_SLICEBUILDER_ADDRESSES] = self.addresses(ports)
        if self.emulated and not has_others:
            # TorchTPU's default is one port for all jobs of a machine.
            shared[env.TORCH_TPU_INTERNAL_HANDSHAKE_PORT] = str(free_ports(1)[0])
        # Last, so that the user's values win.
        return shared | {name: environ[name] for name in NEVER_OVERWRITTEN if environ.get(name)}

    def process_environments(self, environ: Mapping[str, str], cpu_count: int) -> list[dict[str, str]]:
        """Return the whole environment of each process."""
        # With this variable, TorchTPU would meet in a file that is named after the parent process and that it
        # never deletes. A later job whose parent gets the same number would read this job's devices.
        kept = {name: value for name, value in environ.items() if name != env.TORCH_TPU_DEVICES_PER_HOST}
        return super().process_environments(kept, cpu_count)

    def process_environment(self, process: int, cpu_count: int, meeting: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of one process; its number is its rank."""
        host, local = divmod(process, self.layout.processes)
        ranks = {
            tpu_env.RANK: process,
            # TorchTPU opens the device with this number, whatever chips are visible.
            tpu_env.LOCAL_RANK: self.chips[local],
            tpu_env.WORLD_SIZE: self.layout.process_count,
            tpu_env.LOCAL_WORLD_SIZE: self.layout.processes,
            env.NNODES: self.layout.hosts,
            env.NODE_RANK: host,
        }
        addresses, megascale = self.in_slice(process, meeting[env.TORCH_TPU_SLICEBUILDER_ADDRESSES])
        return {
            **{name: str(number) for name, number in ranks.items()},
            **meeting,
            env.TORCH_TPU_SLICEBUILDER_ADDRESSES: addresses,
            **megascale,
            **self._emulated_environment(host, cpu_count, meeting),
        }

    def _emulated_environment(self, host: int, cpu_count: int, meeting: Mapping[str, str]) -> dict[str, str]:
        if self.emulated is None:
            return {}
        # More threads than cores only slow each other down.
        pools = {tpu_env.NPROC: str(max(1, cpu_count // self.layout.replicas))}
        return {**_EMULATED, **pools, **self.emulated_host(host, meeting)}

    def program_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables, over `environ`, for a program that may launch, or use a device itself."""
        if self.emulated is None:
            return {}
        devices = self.chips_of(self.tpu_slice.host_index, self.emulated.devices(environ))
        return {**_EMULATED, **self.emulated.library_environment(devices)}


TorchTpuPlace = Place[TorchTpuPlan]
"""The place of a replica of this runtime."""


def plan_for(environ: Mapping[str, str], kind: str, devices: tuple[int, ...]) -> TorchTpuPlan:
    """Return where the replicas of a job on these devices run.

    Raises:
        UsageError: the devices cannot be used together.
    """
    # The check comes before anything starts: torchrun's processes would wait for ranks that do not exist.
    plan = plan_tpu(environ, devices) if kind == "TPU" else plan_cpu(len(devices))
    torchrun.check(plan, environ)
    return plan


def plan_tpu(environ: Mapping[str, str], devices: tuple[int, ...]) -> TorchTpuPlan:
    """Plan a job on chips of this host, attached or emulated ones.

    Raises:
        UsageError: these chips cannot be used together, or not by TorchTPU.
    """
    layout, tpu_slice, chips, emulated = plan_chips(environ, host_slice(environ), devices)
    each = layout.threads
    # TorchTPU numbers the devices of a host, not its chips, where a chip has two.
    own = tuple(chip * each + core for chip in chips for core in range(each))
    return TorchTpuPlan(Layout(1, len(own), layout.hosts), tpu_slice, own, emulated)


def plan_cpu(count: int) -> TorchTpuPlan:
    """Plan a job on this machine's CPU, which emulates a host with as many chips as replicas."""
    bounds = Bounds(ONE, (count, 1, 1))
    accelerator = AcceleratorType("CPU", CPU_GENERATION, count, bounds)
    tpu_slice = TpuSlice(accelerator, 0, ("localhost",), bounds, (count, 1, 1), "environment")
    return TorchTpuPlan(
        Layout(1, count), tpu_slice, tuple(range(count)), EmulatedTpu(accelerator), is_cpu=True
    )


def host_slice(environ: Mapping[str, str]) -> TpuSlice:
    """Return the slice that this host belongs to, also in a process that a launch has prepared.

    Raises:
        UsageError: neither the environment nor the metadata server describes it.
    """
    found = this_slice(environ)
    generation = found.accelerator.generation
    if generation in ("v2", "v3"):
        raise UsageError(
            f"TorchTPU does not support {generation} chips: it begins with v4",
            where=found.accelerator.name,
            fix="Use runtime 'pjrt' with torch_xla for these.",
        )
    return found
