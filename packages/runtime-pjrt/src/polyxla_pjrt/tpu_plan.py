"""The plan of a job on several TPU cores of this host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from polyxla import UsageError
from polyxla.launcher.ports import LOCALHOST, free_ports
from polyxla_pjrt import env
from polyxla_pjrt.layout import Layout, Plan, thread_pools
from polyxla_pjrt.tpu.accelerators import Bounds
from polyxla_pjrt.tpu.boxes import box
from polyxla_pjrt.tpu.cores import host_core, skip_metadata, this_slice
from polyxla_pjrt.tpu.played import POLYXLA_LIBTPU_DEV, POLYXLA_LIBTPU_SLICE, PlayedTpu, free_addresses
from polyxla_pjrt.tpu.slices import TpuSlice
from polyxla_pjrt.tpu.topology import host_environment, join, process_environments


@dataclass(frozen=True)
class TpuPlan(Plan):
    """Where the replicas of a job run on TPU cores; the slice's other hosts launch their own.

    Attributes:
        tpu_slice: the slice, or the part of this host that the job uses.
        chips: the chip of each process of a host, by its number there.
        played: the TPU that this machine plays; None on a real one.
    """

    tpu_slice: TpuSlice
    chips: tuple[int, ...]
    played: PlayedTpu | None = None

    @property
    def kind(self) -> str:
        """The name of the devices."""
        return "TPU"

    @property
    def is_bridged(self) -> bool:
        """Whether the TPU is a played one; torch_xla drives both in the same way."""
        return self.played is not None

    @property
    def plays_all_hosts(self) -> bool:
        """Whether this launch starts the processes of several hosts."""
        return self.played is not None and self.played.host is None and self.layout.hosts > 1

    @property
    def first_process(self) -> int:
        """The number of this host's first process in the slice."""
        return self.tpu_slice.worker_id * self.layout.processes

    @property
    def processes_here(self) -> range:
        """The numbers of the processes that this launch starts."""
        return range(self.layout.process_count) if self.plays_all_hosts else super().processes_here

    @property
    def launching_hosts(self) -> tuple[str, ...]:
        """The hosts of the slice; one if this launch plays all of them."""
        return self.tpu_slice.hostnames[:1] if self.plays_all_hosts else self.tpu_slice.hostnames

    @property
    def own_host(self) -> int:
        """The number of this host in the slice."""
        return self.tpu_slice.worker_id

    def say(self) -> None:
        """Print once that the TPU is emulated, if it is."""
        if self.played:
            self.played.say(f"{self.layout.replicas} replicas, {self.layout}")

    def with_own_processes(self) -> TpuPlan:
        """Return this plan if each replica has a process of its own.

        Raises:
            UsageError: the cores of a chip share a process.
        """
        if self.layout.threads > 1:
            raise UsageError(
                f"the {self.layout.threads} cores of a chip are replicas of one process, so a program cannot "
                "run once in each",
                where="--each",
                fix="Launch the replicas in the program, by torch_xla.launch or polyxla.launch.",
            )
        return self

    def program_environment(self, environ: Mapping[str, str], cpu_count: int) -> dict[str, str]:
        """Return the variables, over `environ`, for a program that launches the replicas.

        It may use the devices itself: then all chips of its host belong to its process, and an SPMD program
        has those of the slice's other hosts, too.
        """
        device = {env.PJRT_DEVICE: self.kind}
        if self.played is None:
            return device
        pools = thread_pools(Layout(self.layout.replicas), cpu_count)
        devices = self._chips_of(self.tpu_slice.worker_id, self.played.devices(environ))
        return device | pools | self.played.library_environment(devices) | self._slice_environment()

    def _slice_environment(self) -> dict[str, str]:
        if self.played is None or self.played.host is None or self.layout.hosts == 1:
            return {}
        slice_, bounds = self.tpu_slice, self.tpu_slice.bounds
        learned = host_environment(bounds, slice_.worker_id, slice_.hostnames)
        return {POLYXLA_LIBTPU_SLICE: " ".join(f"{name}={value}" for name, value in learned.items())}

    def meeting(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return where the slice's processes meet; played hosts get addresses of this machine."""
        own = self._own_environments(self.tpu_slice.worker_id)
        if self.played is None:
            return {env.TPU_PROCESS_ADDRESSES: own[0][env.TPU_PROCESS_ADDRESSES]}
        devices = {POLYXLA_LIBTPU_DEV: self.played.devices(environ)}
        hostnames = self.tpu_slice.hostnames
        if self.played.host is None:
            hostnames = tuple(free_addresses(self.layout.hosts))
            # torch_xla would choose the same port of this machine for torch.distributed's store of every job.
            devices |= {env.MASTER_ADDR: LOCALHOST, env.MASTER_PORT: str(free_ports(1)[0])}
        addresses = (f"{name}:{one[env.TPU_PROCESS_PORT]}" for name in hostnames for one in own)
        return {env.TPU_PROCESS_ADDRESSES: ",".join(addresses), **devices}

    def process_environment(self, process: int, cpu_count: int, meeting: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of one process: those that libtpu reads, and those of torch_xla's launch."""
        host, rank = divmod(process, self.layout.processes)
        return {
            env.PJRT_DEVICE: self.kind,
            **self._local_variables(process),
            **self._own_environments(host)[rank],
            **skip_metadata(self.tpu_slice),
            **meeting,
            **self._played_environment(host, cpu_count, meeting),
        }

    def _own_environments(self, host: int) -> tuple[dict[str, str], ...]:
        """Return what libtpu reads in each process of a host."""
        return process_environments(
            self.tpu_slice.accelerator,
            worker_id=host,
            hostnames=self.tpu_slice.hostnames,
            bounds=self.tpu_slice.bounds,
            chips=self.chips,
        )

    def _played_environment(self, host: int, cpu_count: int, meeting: Mapping[str, str]) -> dict[str, str]:
        if self.played is None:
            return {}
        devices = self._chips_of(host, meeting[POLYXLA_LIBTPU_DEV])
        own = {env.POLYXLA_EMULATE_HOST: str(host)} if self.plays_all_hosts else {}
        return thread_pools(self.layout, cpu_count) | own | self.played.library_environment(devices)

    def _chips_of(self, host: int, devices: str) -> str:
        """Return the name of a host's chips, from the job's; under torchrun, that may be another host's."""
        return f"{devices.partition('-')[0]}-{host}" if self.layout.hosts > 1 else devices


def plan_cores(environ: Mapping[str, str], devices: tuple[int, ...]) -> TpuPlan:
    """Plan a job on several of this host's cores: a process for each chip, a thread for each core.

    Raises:
        UsageError: these cores cannot be used together.
    """
    tpu_slice, played = this_slice(environ), PlayedTpu.read(environ)
    threads, hosts = tpu_slice.accelerator.threads_per_process, tpu_slice.bounds.host_count
    here = tpu_slice.bounds.chips_per_host_count
    if played and hosts > 1 and played.host is None and len(devices) == here * hosts * threads:
        # All hosts of a played TPU.
        devices = devices[: here * threads]
    chips = tuple(sorted({host_core(tpu_slice, device) // threads for device in devices}))
    if len(chips) * threads != len(devices):
        raise UsageError(
            f"the cores {list(devices)} cannot be used together: a process drives the {threads} cores of a "
            "chip",
            where="devices",
            fix="Take both cores of each chip, such as devices=[0, 1], or one core only.",
        )
    if len(chips) != here:
        bounds = _box(tpu_slice, chips)
        tpu_slice = replace(tpu_slice, bounds=bounds, worker_id=0, hostnames=("localhost",))
    layout = Layout(threads, len(chips), tpu_slice.bounds.host_count)
    return TpuPlan(layout, tpu_slice, chips, played)


def _box(tpu_slice: TpuSlice, chips: Sequence[int]) -> Bounds:
    """Return the bounds of some chips of a host.

    Raises:
        UsageError: they form no box, or the slice has other hosts, which would wait for the other chips.
    """
    if tpu_slice.bounds.host_count > 1:
        raise UsageError(
            f"the TPU chips {join(chips)} cannot be used together: the slice's {tpu_slice.bounds.host_count} "
            "hosts must use all their chips",
            where="devices",
            fix="Leave devices out to use all of them, or write devices=[i] for one core.",
        )
    return box(tpu_slice.accelerator.generation, tpu_slice.host, chips)
