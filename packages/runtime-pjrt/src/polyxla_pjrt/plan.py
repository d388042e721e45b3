"""The plan of a job: its replicas in hosts, processes and threads, and the environment of each process.

Light, and nothing here starts anything: discovery, `polyxla run` and plain torch_xla programs ask for plans.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass

from polyxla import UsageError
from polyxla.plugin import (
    LOCALHOST,
    POLYXLA_LIBTPU_SLICE,
    POLYXLA_SECRET,
    AcceleratorType,
    ChipPlan,
    Discovery,
    EmulatedTpu,
    Layout,
    Place,
    Plan,
    TpuSlice,
    check_device_variables,
    free_ports,
    host_core,
    host_environment,
    pip_install,
    plan_chips,
    process_environments,
    single_core_environment,
    skip_metadata,
    torchrun,
    tpu_env,
    with_secret,
)
from polyxla.plugin import this_slice as described_slice
from polyxla_pjrt import env

THREADS_PER_REPLICA = 4
"""Threads that torch_xla's pool must have for each replica of a process. Executions wait in the pool for each
other: a pool full of waiting ones never starts the one they wait for."""
BRIDGED_CPU = "CPU_POLYXLA"
"""The value of ``PJRT_DEVICE`` that chooses the bridge. torch_xla's Python reads it up to the underscore, so
the device keeps its usual name."""

_GIVEN_TO_PROCESSES = (
    tpu_env.TPU_PROCESS_BOUNDS,
    tpu_env.TPU_CHIPS_PER_PROCESS_BOUNDS,
    tpu_env.TPU_VISIBLE_CHIPS,
    tpu_env.CLOUD_TPU_TASK_ID,
)
"""Variables of a process of a launch. They describe a part of the host, not the host."""


@dataclass(frozen=True)
class PjrtPlan(Plan):
    """Where the replicas of a job run: on the CPU, unless it is a `TpuPlan`.

    Attributes:
        layout: how replicas are spread over processes and threads.
    """

    layout: Layout

    @property
    def kind(self) -> str:
        """The name of the devices."""
        return "CPU"

    @property
    def is_bridged(self) -> bool:
        """Whether the replicas compute on the bridge; otherwise they do on TPU chips."""
        return True

    @property
    def processes_here(self) -> range:
        """The numbers of the processes that this host starts."""
        return range(self.layout.processes)

    @property
    def launching_hosts(self) -> tuple[str, ...]:
        """The hosts whose launches monitor each other; none for CPU replicas, which the bridge monitors."""
        return ()

    @property
    def own_host(self) -> int:
        """The number of this host among them."""
        return 0

    def say(self) -> None:
        """Print nothing: replicas on the CPU are what the user asked for."""

    def with_own_processes(self) -> PjrtPlan:
        """Return the plan in which each replica has a process of its own.

        Raises:
            UsageError: that is impossible; see `TpuPlan`.
        """
        return PjrtPlan(Layout(1, self.layout.replicas))

    def program_environment(self, environ: Mapping[str, str], cpu_count: int) -> dict[str, str]:
        """Return the variables, over `environ`, for a program that launches the replicas."""
        # The program keeps torch_xla's own client: it may be an SPMD program, which launches nothing.
        return {
            env.PJRT_DEVICE: self.kind,
            env.CPU_NUM_DEVICES: environ.get(env.CPU_NUM_DEVICES) or str(self.layout.replicas),
        }

    def meeting(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Choose the ports of the bridge's coordinator and of torch.distributed's store."""
        # It is imported here, as below: a plan of TPU chips needs no bridge, which may not be installed.
        from polyxla_bridge import env as bridge

        coordinator, store = free_ports(2)
        # The store is torch.distributed's; torch_xla would choose the same port for all jobs of a machine.
        return {
            bridge.POLYXLA_BRIDGE_COORDINATOR: f"{LOCALHOST}:{coordinator}",
            tpu_env.MASTER_ADDR: LOCALHOST,
            tpu_env.MASTER_PORT: str(store),
        }

    def process_environment(self, process: int, cpu_count: int, meeting: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of one process."""
        return {
            **self._bridge_variables(process, cpu_count),
            **self._local_variables(process),
            **meeting,
        }

    def _local_variables(self, process: int) -> dict[str, str]:
        """Return what torch_xla's own launch tells a process of its host."""
        return {
            env.PJRT_LOCAL_PROCESS_RANK: str(process % self.layout.processes),
            env.PJRT_LOCAL_PROCESS_COUNT: str(self.layout.processes),
        }

    def _bridge_variables(self, process: int, cpu_count: int) -> dict[str, str]:
        from polyxla_bridge import env as bridge

        return {
            env.PJRT_DEVICE: BRIDGED_CPU,
            **thread_pools(self.layout, cpu_count),
            bridge.POLYXLA_BRIDGE_REPLICAS: str(self.layout.replicas),
            bridge.POLYXLA_BRIDGE_PROCESSES: str(self.layout.process_count),
            bridge.POLYXLA_BRIDGE_PROCESS: str(process),
        }


@dataclass(frozen=True)
class TpuPlan(ChipPlan, PjrtPlan):
    """Where the replicas of a job run on TPU cores, as torch_xla's own launch would start them."""

    @property
    def is_bridged(self) -> bool:
        """Whether the TPU is an emulated one; torch_xla drives both in the same way."""
        return self.emulated is not None

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
        if self.emulated is None:
            return device
        # The program drives the devices of its host. A pool for those of all hosts would have a thousand
        # threads on a v5e-256, in each of 64 programs.
        own = Layout(self.layout.processes * self.layout.threads, hosts=self.layout.hosts)
        pools = thread_pools(own, cpu_count)
        devices = self.chips_of(self.tpu_slice.host_index, self.emulated.devices(environ))
        # The program itself is a process of the host: it must find the same chips as its replicas.
        return device | pools | self.emulated.library_environment(devices) | self._slice_environment(environ)

    def _slice_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        if self.emulated is None or self.emulated.host is None or self.layout.hosts == 1:
            return {}
        # Programs on the other emulated hosts meet this one, as on a pod, and prove the same secret.
        slice_, bounds = self.tpu_slice, self.tpu_slice.bounds
        learned = host_environment(bounds, slice_.worker_id, slice_.hostnames)
        if slice_.megascale:
            # The only host of one of several slices is not localhost, where the others' hosts may be, too.
            learned[tpu_env.TPU_PROCESS_ADDRESSES] = self.addresses([learned[tpu_env.TPU_PROCESS_PORT]])
            learned |= slice_.megascale.variables()
        return {
            POLYXLA_LIBTPU_SLICE: " ".join(f"{name}={value}" for name, value in learned.items()),
            POLYXLA_SECRET: with_secret(environ, self.layout.hosts)[POLYXLA_SECRET],
        }

    def meeting(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return where the slice's processes meet; emulated hosts get addresses of this machine."""
        own = self._own_environments(self.tpu_slice.host_index)
        if self.emulated is None:
            # The hosts of a real slice launch separately, so nothing can be chosen: they all compute the same
            # addresses from the slice's description.
            return {tpu_env.TPU_PROCESS_ADDRESSES: own[0][tpu_env.TPU_PROCESS_ADDRESSES]}
        # All emulated hosts are this machine, so their processes need addresses that differ by host.
        addresses = self.addresses([variables[tpu_env.TPU_PROCESS_PORT] for variables in own])
        return {tpu_env.TPU_PROCESS_ADDRESSES: addresses, **self.emulated_meeting(environ)}

    def process_environment(self, process: int, cpu_count: int, meeting: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of one process: those that libtpu reads, and those of torch_xla's launch."""
        host, rank = divmod(process, self.layout.processes)
        addresses, megascale = self.in_slice(process, meeting[tpu_env.TPU_PROCESS_ADDRESSES])
        return {
            env.PJRT_DEVICE: self.kind,
            **self._local_variables(process),
            **self._own_environments(host)[rank],
            **skip_metadata(self.tpu_slice),
            # This comes after the host's own: the addresses of emulated hosts replace those that the
            # description implies.
            **meeting,
            tpu_env.TPU_PROCESS_ADDRESSES: addresses,
            **megascale,
            **(self.tpu_slice.megascale.ports(rank) if self.tpu_slice.megascale else {}),
            **self._emulated_environment(host, cpu_count, meeting),
        }

    def _own_environments(self, host: int) -> tuple[dict[str, str], ...]:
        """Return what libtpu reads in each process of a host of the job."""
        return process_environments(
            self.tpu_slice.accelerator,
            worker_id=host % self.tpu_slice.bounds.host_count,
            hostnames=self.tpu_slice.hostnames,
            bounds=self.tpu_slice.bounds,
            chips=self.chips,
        )

    def _emulated_environment(self, host: int, cpu_count: int, meeting: Mapping[str, str]) -> dict[str, str]:
        if self.emulated is None:
            return {}
        return thread_pools(self.layout, cpu_count) | self.emulated_host(host, meeting)


PjrtPlace = Place[PjrtPlan]
"""The place of a replica of this runtime."""


def thread_pools(layout: Layout, cpu_count: int) -> dict[str, str]:
    """Return the sizes of the thread pools of a process whose replicas compute on the CPU.

    Args:
        layout: of all replicas on this machine.
        cpu_count: cores of this machine.
    """
    # Each replica has its own pools, and more threads than cores only slow each other down.
    compute = max(1, cpu_count // layout.replicas)
    waiting = THREADS_PER_REPLICA * layout.threads
    return {tpu_env.NPROC: str(compute), env.XLA_THREAD_POOL_SIZE: str(max(cpu_count, waiting))}


def plan_for(environ: Mapping[str, str], kind: str, devices: tuple[int, ...]) -> PjrtPlan | None:
    """Return where several replicas will run; None for one replica.

    Raises:
        UsageError: these devices cannot be used together, or the bridge is not installed.
    """
    started = torchrun.process_count(environ)
    # One replica of torchrun's may still be one of several, which the check below refuses.
    if len(devices) == 1 and (kind == "TPU" or started in (None, 1)):
        return None
    if kind == "TPU":
        plan: PjrtPlan = plan_cores(environ, devices)
    else:
        require_bridge(len(devices))
        check_device_variables(environ)
        plan = PjrtPlan(cpu_layout(len(devices), environ, started))
    # Before anything starts: torchrun's processes would wait for replicas that do not exist.
    torchrun.check(plan, environ)
    return plan


def plan_cores(environ: Mapping[str, str], devices: tuple[int, ...]) -> TpuPlan:
    """Plan a job on several of this host's cores: a process for each chip, a thread for each core.

    Raises:
        UsageError: these cores cannot be used together.
    """
    return TpuPlan(*plan_chips(environ, this_slice(environ), devices))


def cpu_layout(count: int, environ: Mapping[str, str], started: int | None = None) -> Layout:
    """Lay out CPU replicas: one per process, unless POLYXLA_PJRT_PROCESSES sets the number of processes.

    Args:
        count: number of replicas.
        environ: the environment with that variable.
        started: number of processes that torchrun has started; None without torchrun.

    Raises:
        UsageError: the processes cannot share the replicas equally.
    """
    text = environ.get(env.POLYXLA_PJRT_PROCESSES) or str(started or count)
    # isdecimal alone accepts the digits of other scripts.
    processes = int(text) if text.isascii() and text.isdecimal() else 0
    if not 1 <= processes <= count or count % processes:
        divisors = [str(number) for number in range(1, count + 1) if count % number == 0]
        raise UsageError(
            f"{text} processes cannot share {count} replicas equally",
            where=f"{env.POLYXLA_PJRT_PROCESSES}={text}",
            fix=f"Write one of {', '.join(divisors)}, or unset it for one process per replica.",
        )
    return Layout(threads=count // processes, processes=processes)


def require_bridge(count: int) -> None:
    """Check that the bridge is installed.

    Raises:
        UsageError: it is missing.
    """
    if importlib.util.find_spec("polyxla_bridge") is None:
        raise UsageError(
            f"{count} replicas on the CPU need polyxla-bridge, which is not installed",
            where="devices",
            fix=f"Install it ({pip_install('polyxla-bridge')}), or write devices=1.",
        )


def replica_environment(
    environ: Mapping[str, str], discovery: Discovery, devices: tuple[int, ...]
) -> dict[str, str]:
    """Return the variables of a job; `PjrtPlan.process_environments` adds those of each process.

    Raises:
        UsageError: these TPU cores cannot be used together, or the bridge is missing.
    """
    if plan := plan_for(environ, discovery.kind, devices):
        return plan.program_environment(environ, os.cpu_count() or 1)
    if discovery.kind == "TPU":
        return core_environment(environ, devices[0])
    return {env.PJRT_DEVICE: "CPU", env.POLYXLA_PJRT_LOCAL_DEVICE: str(devices[0])}


def core_environment(environ: Mapping[str, str], device: int) -> dict[str, str]:
    """Return the variables of a process that uses one core of this host and no other.

    Raises:
        UsageError: ``polyxla run`` has prepared this process for another core.
    """
    if prepared := environ.get(env.POLYXLA_PJRT_DEVICE):
        _check_same(int(prepared), device)
        return {}
    tpu_slice, emulated = this_slice(environ), EmulatedTpu.read(environ)
    # The default bounds of the type: the slice's own may have fewer chips than the host.
    accelerator = AcceleratorType.parse(tpu_slice.accelerator.name, tpu_slice.origin)
    # On v2 and v3 a process sees both cores of a chip, and uses the one with this number.
    variables, local_device = single_core_environment(host_core(tpu_slice, device), accelerator)
    return {
        env.PJRT_DEVICE: "TPU",
        **variables,
        **skip_metadata(tpu_slice),
        **({tpu_env.SKIP_MEGASCALE_PJRT_CLIENT: "true"} if tpu_slice.megascale else {}),
        **(emulated.library_environment(emulated.devices(environ)) if emulated else {}),
        env.POLYXLA_PJRT_DEVICE: str(device),
        env.POLYXLA_PJRT_LOCAL_DEVICE: str(local_device),
    }


def _check_same(prepared: int, device: int) -> None:
    if prepared != device:
        raise UsageError(
            f"this process was prepared for device {prepared}, but the code requests device {device}",
            where=f"devices=[{device}]",
            fix=f"Leave devices= out of the code, or run it with polyxla run --devices '[{device}]'.",
        )


def this_slice(environ: Mapping[str, str]) -> TpuSlice:
    """Return the slice that this host belongs to, also in a process that a launch has prepared.

    Raises:
        UsageError: neither the environment nor the metadata server describes it.
    """
    if is_prepared(environ):
        # These variables describe the process's part of the host.
        environ = {name: value for name, value in environ.items() if name not in _GIVEN_TO_PROCESSES}
    return described_slice(environ)


def is_prepared(environ: Mapping[str, str]) -> bool:
    """Return whether a launch has prepared this process for some of the host's chips."""
    return env.PJRT_LOCAL_PROCESS_COUNT in environ or env.POLYXLA_PJRT_DEVICE in environ
