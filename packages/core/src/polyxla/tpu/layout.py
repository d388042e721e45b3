"""Where the replicas of a job run: in hosts, processes and threads. Each TPU chip has its process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from polyxla.contracts.replication import World
from polyxla.errors import UsageError
from polyxla.launcher.ports import LOCALHOST, free_ports
from polyxla.tpu import env
from polyxla.tpu.accelerators import Bounds
from polyxla.tpu.emulated import POLYXLA_LIBTPU_DEV, EmulatedTpu, free_addresses
from polyxla.tpu.megascale import DEFAULT_PORT
from polyxla.tpu.parts import box
from polyxla.tpu.slices import TpuSlice, host_core
from polyxla.tpu.topology import join

PlanT = TypeVar("PlanT", bound="Plan")
_AnyPlanT = TypeVar("_AnyPlanT")


@dataclass(frozen=True)
class Layout:
    """Numbers of threads, processes and hosts; ordinals count through them in that order.

    Attributes:
        threads: replicas in each process.
        processes: processes on each host.
        hosts: number of hosts; emulated ones may all be this machine.
    """

    threads: int = 1
    processes: int = 1
    hosts: int = 1

    @property
    def process_count(self) -> int:
        """Number of processes on all hosts."""
        return self.processes * self.hosts

    @property
    def replicas(self) -> int:
        """The world size."""
        return self.threads * self.process_count

    def __str__(self) -> str:
        hosts = f"{self.hosts} hosts x " if self.hosts > 1 else ""
        return f"{hosts}{self.processes} processes x {self.threads} threads"

    def world(self, process: int, thread: int) -> World:
        """Return where the replica in a thread of a process stands."""
        host, local_process = divmod(process, self.processes)
        return World(
            world_size=self.replicas,
            ordinal=process * self.threads + thread,
            local_ordinal=local_process * self.threads + thread,
            local_world_size=self.processes * self.threads,
            process_index=process,
            process_count=self.process_count,
            host_index=host,
            host_count=self.hosts,
        )


class Plan(ABC):
    """Where the replicas of a job run; a runtime derives its own.

    Attributes:
        layout: how all replicas are spread over processes.
    """

    layout: Layout

    @property
    @abstractmethod
    def kind(self) -> str:
        """The name of the devices."""

    @property
    @abstractmethod
    def processes_here(self) -> range:
        """The numbers of the processes that this launch starts."""

    @property
    @abstractmethod
    def launching_hosts(self) -> tuple[str, ...]:
        """The hosts whose launches monitor each other; none if the devices themselves report a stall."""

    @property
    @abstractmethod
    def own_host(self) -> int:
        """The number of this host among them."""

    @property
    def slices(self) -> int:
        """Number of TPU slices, each with as many of the hosts."""
        return 1

    @abstractmethod
    def say(self) -> None:
        """Print what the user should know before the replicas start."""

    @abstractmethod
    def meeting(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Choose what all processes share, such as where they meet: variables over `environ`.

        Called in one process only: it chooses ports and names at random.
        """

    @abstractmethod
    def process_environment(self, process: int, cpu_count: int, meeting: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of one process.

        Args:
            process: its number among all processes.
            cpu_count: cores of this machine, which the processes share.
            meeting: what `meeting` has returned in one of the processes.
        """

    def process_environments(self, environ: Mapping[str, str], cpu_count: int) -> list[dict[str, str]]:
        """Return the complete environment of each process that this host starts, over `environ`."""
        # It is chosen once for all processes: ports that each chose for itself would differ.
        meeting = self.meeting(environ)
        return [
            {**environ, **self.process_environment(process, cpu_count, meeting)}
            for process in self.processes_here
        ]


@dataclass(frozen=True)
class Place(Generic[_AnyPlanT]):
    """The place of one replica in a plan.

    Attributes:
        plan: where all replicas run: a runtime's plan.
        process: number of its process.
        thread: number of its thread within the process.
    """

    plan: _AnyPlanT
    process: int
    thread: int = 0


@dataclass(frozen=True)
class ChipPlan(Plan):
    """Where the replicas of a job run; the slice's other hosts launch their own.

    Attributes:
        layout: how the replicas are spread over processes and hosts.
        tpu_slice: the slice, or the part of this host that the job uses.
        chips: the chip of each process of a host, by its number there; the device, if it drives one of two.
        emulated: the TPU that this machine emulates; None on a real one.
    """

    layout: Layout
    tpu_slice: TpuSlice
    chips: tuple[int, ...]
    emulated: EmulatedTpu | None

    @property
    def kind(self) -> str:
        """The name of the devices."""
        return "TPU"

    @property
    def emulates_all_hosts(self) -> bool:
        """Whether this launch starts the processes of several hosts."""
        return self.emulated is not None and self.emulated.host is None and self.layout.hosts > 1

    @property
    def first_process(self) -> int:
        """The number of this host's first process in the job."""
        return self.tpu_slice.host_index * self.layout.processes

    @property
    def processes_here(self) -> range:
        """The numbers of the processes that this launch starts."""
        if self.emulates_all_hosts:
            return range(self.layout.process_count)
        return range(self.first_process, self.first_process + self.layout.processes)

    @property
    def launching_hosts(self) -> tuple[str, ...]:
        """The hosts of the slices, with an empty name if unknown; one if this launch emulates all of them."""
        own = self.tpu_slice.hostnames
        # Where one launch starts all processes, no other launch will ever connect to the monitor.
        if self.emulates_all_hosts:
            return own[:1]
        if self.tpu_slice.megascale is None:
            return own
        names = [""] * self.layout.hosts
        names[0] = self.tpu_slice.megascale.first_host
        first = self.tpu_slice.host_index - self.tpu_slice.worker_id
        names[first : first + len(own)] = own
        return tuple(names)

    @property
    def own_host(self) -> int:
        """The number of this host in the job."""
        return self.tpu_slice.host_index

    @property
    def slices(self) -> int:
        """Number of slices of the job."""
        return self.tpu_slice.slices

    def say(self) -> None:
        """Print once that the TPU is emulated, if it is."""
        if self.emulated:
            self.emulated.say(f"{self.layout.replicas} replicas, {self.layout}")

    def addresses(self, ports: Sequence[str]) -> str:
        """Return ``host:port`` of every process of the slice; emulated hosts get addresses of this machine.

        Where this launch emulates several slices, they are those of all, one slice after the other.

        Args:
            ports: those of a host's processes.
        """
        hostnames = self.tpu_slice.hostnames
        if self.emulated and self.emulated.host is None:
            hostnames = tuple(free_addresses(self.layout.hosts))
        return ",".join(f"{name}:{port}" for name in hostnames for port in ports)

    def emulated_meeting(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return what the processes of an emulated TPU share; nothing for a real one."""
        if self.emulated is None:
            return {}
        devices = {POLYXLA_LIBTPU_DEV: self.emulated.devices(environ)}
        if self.emulated.host is None:
            # A fixed port would be the same for every job of this machine.
            devices |= {env.MASTER_ADDR: LOCALHOST, env.MASTER_PORT: str(free_ports(1)[0])}
        return devices

    def emulated_host(self, host: int, meeting: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that point a process at the emulated libtpu, and select its chips there.

        Args:
            host: the number of the process's host.
            meeting: what `emulated_meeting` has returned in one of the processes.
        """
        if self.emulated is None:
            return {}
        own = {env.POLYXLA_EMULATE_HOST: str(host)} if self.emulates_all_hosts else {}
        return own | self.emulated.library_environment(self.chips_of(host, meeting[POLYXLA_LIBTPU_DEV]))

    def in_slice(self, process: int, addresses: str) -> tuple[str, dict[str, str]]:
        """Return the addresses of a process's slice, and the variables that describe that among several.

        Args:
            process: its number in the job.
            addresses: what `addresses` returned in one of the processes.
        """
        megascale = self.tpu_slice.megascale
        if megascale is None:
            return addresses, {}
        listed, each = addresses.split(","), self.layout.process_count // self.slices
        slice_id = process // each
        if len(listed) > each:
            # Emulated hosts have addresses that were chosen for this launch; the slices meet at the first.
            first = listed[0].rpartition(":")[0]
            megascale = replace(megascale, coordinator=f"{first}:{DEFAULT_PORT}")
            listed = listed[slice_id * each : (slice_id + 1) * each]
        else:
            # Under torchrun, a process of another slice may have chosen them, with that slice's hosts.
            ports = [address.rpartition(":")[2] for address in listed[: self.layout.processes]]
            listed = self.addresses(ports).split(",")
        megascale = replace(megascale, slice_id=slice_id)
        return ",".join(listed), megascale.variables()

    def chips_of(self, host: int, devices: str) -> str:
        """Return the name of a host's chips, from the job's; under torchrun, that may be another host's."""
        # The name may end with the number of another host, whose process chose it under torchrun.
        return f"{devices.partition('-')[0]}-{host}" if self.layout.hosts > 1 else devices


def plan_chips(
    environ: Mapping[str, str], tpu_slice: TpuSlice, devices: tuple[int, ...]
) -> tuple[Layout, TpuSlice, tuple[int, ...], EmulatedTpu | None]:
    """Plan a job on several of this host's cores: a process for each chip, a thread for each core.

    Returns:
        The arguments of a `ChipPlan`.

    Raises:
        UsageError: these cores cannot be used together.
    """
    emulated = EmulatedTpu.read(environ)
    threads, hosts = tpu_slice.accelerator.threads_per_process, tpu_slice.host_count
    here = tpu_slice.bounds.chips_per_host_count
    if emulated and hosts > 1 and emulated.host is None and len(devices) == here * hosts * threads:
        # The launch emulates all hosts: plan the first, the others are alike.
        devices = devices[: here * threads]
    chips = tuple(sorted({host_core(tpu_slice, device) // threads for device in devices}))
    if len(chips) * threads != len(devices):
        raise UsageError(
            f"the cores {list(devices)} are not whole chips, which have {threads} cores each",
            where="devices",
            fix="Take both cores of each chip, such as devices=[0, 1]; runtime 'pjrt' can use a single core.",
        )
    # A part of the host is a slice of its own for libtpu, with a single host.
    if len(chips) != here:
        bounds = _box(tpu_slice, chips)
        tpu_slice = replace(tpu_slice, bounds=bounds, worker_id=0, hostnames=("localhost",))
    return Layout(threads, len(chips), tpu_slice.host_count), tpu_slice, chips, emulated


def _box(tpu_slice: TpuSlice, chips: Sequence[int]) -> Bounds:
    """Return the bounds of some chips of a host.

    Raises:
        UsageError: they form no box, or the slice has other hosts, which would wait for the other chips.
    """
    if tpu_slice.host_count > 1:
        whose = f"{tpu_slice.slices} slices'" if tpu_slice.slices > 1 else "slice's"
        raise UsageError(
            f"the TPU chips {join(chips)} cannot be used together: the {whose} {tpu_slice.host_count} "
            "hosts must use all their chips",
            where="devices",
            fix="Leave devices out to use all of them, or write devices=[i] for one core.",
        )
    return box(tpu_slice.accelerator.generation, tpu_slice.host, chips)
