"""The layout of replicas over hosts, processes and threads, and the environment of each process.

Pure functions: no environment and no files; the search for a free port is the exception.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from polyxla import UsageError, World
from polyxla.console import say_once
from polyxla.errors import pip_install
from polyxla.launcher.ports import LOCALHOST, free_ports
from polyxla_pjrt import env
from polyxla_pjrt.tpu.accelerators import AcceleratorType
from polyxla_pjrt.tpu.topology import join

THREADS_PER_REPLICA = 4
"""Threads that torch_xla's pool must have for each replica of a process. Executions wait in the pool for each
other: a pool full of waiting ones never starts the one they wait for."""
PREPARED = {"CPU": "CPU_POLYXLA", "TPU": "TPU_POLYXLA"}
"""The values of ``PJRT_DEVICE`` that choose the bridge. torch_xla's Python reads them up to the first
underscore, so the device keeps its usual name."""


@dataclass(frozen=True)
class Layout:
    """Numbers of threads, processes and hosts; ordinals count through them in that order.

    Attributes:
        threads: replicas in each process.
        processes: processes on each host.
        hosts: number of hosts; emulated ones are all this machine.
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


@dataclass(frozen=True)
class Plan:
    """Where the replicas of a job run: on the bridge; `polyxla_pjrt.tpu_plan.TpuPlan` is for TPU cores.

    Attributes:
        kind: the name of the devices, ``CPU`` or ``TPU``.
        layout: how replicas are spread over processes and threads.
        accelerator: the emulated TPU; None on the CPU.
    """

    kind: str
    layout: Layout
    accelerator: AcceleratorType | None = None

    @property
    def is_bridged(self) -> bool:
        """Whether the replicas run on the bridge; otherwise they run on torch_xla's own client."""
        return True

    @property
    def first_process(self) -> int:
        """The number of the first process that this host starts."""
        return 0

    def with_own_processes(self) -> Plan:
        """Return the plan in which each replica has a process of its own, also on an emulated v2 or v3.

        Raises:
            UsageError: that is impossible; see `polyxla_pjrt.tpu_plan.TpuPlan`.
        """
        layout = self.layout
        return replace(self, layout=Layout(1, layout.processes * layout.threads, layout.hosts))

    def program_environment(self, cpu_count: int) -> dict[str, str]:
        """Return the variables for a program that launches the replicas, and may hold them all as threads."""
        coordinator = _coordinator_variable(free_ports(1)[0])
        return self._bridge_variables(Layout(threads=self.layout.replicas), 0, cpu_count, coordinator)

    def process_environments(self, environ: Mapping[str, str], cpu_count: int) -> list[dict[str, str]]:
        """Return the complete environment of each process, over `environ`. Chooses free ports."""
        coordinator, store = free_ports(2)
        # The store is torch.distributed's; torch_xla would choose the same port for all jobs of a machine.
        ports = _coordinator_variable(coordinator) | {env.MASTER_ADDR: LOCALHOST, env.MASTER_PORT: str(store)}
        return [
            {**environ, **self.process_environment(process, cpu_count, ports)}
            for process in range(self.layout.process_count)
        ]

    def process_environment(self, process: int, cpu_count: int, ports: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of one process.

        Args:
            process: its number among all processes.
            cpu_count: cores of this machine, which the processes share.
            ports: the variables with the addresses where the processes connect.
        """
        host, rank = divmod(process, self.layout.processes)
        local = {
            env.PJRT_LOCAL_PROCESS_RANK: str(rank),
            env.PJRT_LOCAL_PROCESS_COUNT: str(self.layout.processes),
        }
        bridge = self._bridge_variables(self.layout, process, cpu_count, ports)
        return bridge | local | self._slice_variables(host, process)

    def _bridge_variables(
        self, layout: Layout, process: int, cpu_count: int, ports: Mapping[str, str]
    ) -> dict[str, str]:
        from polyxla_bridge import env as bridge

        # Each replica has its own pools, and more threads than cores only slow each other down.
        compute = max(1, cpu_count // layout.replicas)
        waiting = THREADS_PER_REPLICA * layout.threads
        kind = f"TPU {self.accelerator.generation}" if self.accelerator else "polyxla CPU"
        return {
            **ports,
            env.PJRT_DEVICE: PREPARED[self.kind],
            env.NPROC: str(compute),
            env.XLA_THREAD_POOL_SIZE: str(max(cpu_count, waiting)),
            bridge.POLYXLA_BRIDGE_REPLICAS: str(layout.replicas),
            bridge.POLYXLA_BRIDGE_PROCESSES: str(layout.process_count),
            bridge.POLYXLA_BRIDGE_PROCESS: str(process),
            bridge.POLYXLA_BRIDGE_PLATFORM: self.kind,
            bridge.POLYXLA_BRIDGE_KIND: kind,
        } | self._slice_variables(0, 0)

    def _slice_variables(self, host: int, process: int) -> dict[str, str]:
        """Return the description of the emulated slice, so that nothing asks the metadata server."""
        if self.accelerator is None:
            return {}
        names = ",".join(["localhost"] * self.layout.hosts)
        return {
            env.TPU_SKIP_MDS_QUERY: "1",
            env.TPU_ACCELERATOR_TYPE: self.accelerator.name,
            env.TPU_PROCESS_BOUNDS: join(self.accelerator.bounds.hosts),
            env.TPU_CHIPS_PER_PROCESS_BOUNDS: join(self.accelerator.bounds.chips_per_host),
            env.TPU_WORKER_ID: str(host),
            env.TPU_WORKER_HOSTNAMES: names,
            env.CLOUD_TPU_TASK_ID: str(process),
        }


@dataclass(frozen=True)
class Place:
    """The place of one replica in a plan.

    Attributes:
        plan: where all replicas run.
        process: number of its process.
        thread: number of its thread within the process.
    """

    plan: Plan
    process: int
    thread: int


def say_emulated(plan: Plan) -> None:
    """Print once that a TPU is emulated, if the plan emulates one."""
    if plan.accelerator:
        say_once(
            f"emulating a {plan.accelerator.name} on this machine's CPU: {plan.layout.replicas} replicas, "
            f"{plan.layout}; names and layout are a TPU's, numbers and speed the CPU's"
        )


def _coordinator_variable(port: int) -> dict[str, str]:
    from polyxla_bridge import env as bridge

    return {bridge.POLYXLA_BRIDGE_COORDINATOR: f"{LOCALHOST}:{port}"}


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
    processes = int(text) if text.isascii() and text.isdecimal() else 0
    if not 1 <= processes <= count or count % processes:
        divisors = [str(number) for number in range(1, count + 1) if count % number == 0]
        raise UsageError(
            f"{text} processes cannot share {count} replicas equally",
            where=f"{env.POLYXLA_PJRT_PROCESSES}={text}",
            fix=f"Write one of {', '.join(divisors)}, or unset it for one process per replica.",
        )
    return Layout(threads=count // processes, processes=processes)


def tpu_layout(accelerator: AcceleratorType, devices: Sequence[int]) -> Layout:
    """Lay out replicas on devices of an emulated slice, like the slice itself where possible.

    A process drives one chip, with a thread for each of its devices; a job of one device has one thread.

    Raises:
        UsageError: only one of a chip's two devices is chosen, which a TPU refuses, too.
    """
    threads = accelerator.threads_per_process
    if len(devices) == accelerator.devices:
        return Layout(threads, accelerator.chips_per_host, accelerator.hosts)
    chips = {device // threads for device in devices}
    if len(chips) * threads == len(devices):
        return Layout(threads, len(chips))
    if len(devices) == 1:
        return Layout()
    raise UsageError(
        f"the cores {list(devices)} cannot be used together: a process drives the {threads} cores of a chip",
        where="devices",
        fix="Take both cores of each chip, such as devices=[0, 1], or one core only.",
    )


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
