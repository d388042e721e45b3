"""How replicas are laid out over hosts, processes and threads, and what each process must be told.

Pure functions: no environment and no files; the search for a free port is the exception.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyxla import UsageError, World
from polyxla.console import say_once
from polyxla.launcher.ports import LOCALHOST, free_ports
from polyxla_pjrt import env
from polyxla_pjrt.tpu.accelerators import AcceleratorType
from polyxla_pjrt.tpu.topology import join

THREADS_PER_REPLICA = 4
"""How many threads torch_xla's pool must have for each replica of a process: executions wait in it for each
other, and a pool that is full of waiting ones never starts the one they wait for."""
PREPARED = {"CPU": "CPU_POLYXLA", "TPU": "TPU_POLYXLA"}
"""The values of ``PJRT_DEVICE`` that choose the bridge. torch_xla's Python reads them up to the first
underscore, and so calls the device what it is, or stands for."""


@dataclass(frozen=True)
class Layout:
    """Replicas in threads, in processes, on hosts; ordinals count through them in that order.

    Attributes:
        threads: replicas of each process.
        processes: processes of each host.
        hosts: number of hosts; where they are emulated, all are this machine.
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
    """What a job of several replicas runs on: here, on the bridge.

    Attributes:
        kind: what the devices are called, ``CPU`` or ``TPU``.
        layout: where the replicas are.
        accelerator: the TPU that is emulated; None on the CPU.
    """

    kind: str
    layout: Layout
    accelerator: AcceleratorType | None = None

    @property
    def is_bridged(self) -> bool:
        """Whether the replicas are on the bridge; else they are on torch_xla's own client."""
        return True

    @property
    def first_process(self) -> int:
        """The number of the first process that this host starts."""
        return 0

    def whole(self, cpu_count: int) -> dict[str, str]:
        """Return what a process must find in its environment that holds all the replicas itself."""
        return self._own(Layout(threads=self.layout.replicas), 0, cpu_count, _meeting(free_ports(1)[0]))

    def each(self, environ: Mapping[str, str], cpu_count: int) -> list[dict[str, str]]:
        """Return the whole environment of each process, over `environ`; they meet at a port of their own."""
        coordinator, store = free_ports(2)
        # The store is torch.distributed's; torch_xla's own choice is one port for all jobs of a machine.
        meeting = _meeting(coordinator) | {env.MASTER_ADDR: LOCALHOST, env.MASTER_PORT: str(store)}
        return [
            {**environ, **self.one(process, cpu_count, meeting)}
            for process in range(self.layout.process_count)
        ]

    def one(self, process: int, cpu_count: int, meeting: Mapping[str, str]) -> dict[str, str]:
        """Return what is laid over the environment of one process."""
        host, rank = divmod(process, self.layout.processes)
        local = {
            env.PJRT_LOCAL_PROCESS_RANK: str(rank),
            env.PJRT_LOCAL_PROCESS_COUNT: str(self.layout.processes),
        }
        return self._own(self.layout, process, cpu_count, meeting) | local | self._slice(host, process)

    def _own(
        self, layout: Layout, process: int, cpu_count: int, meeting: Mapping[str, str]
    ) -> dict[str, str]:
        from polyxla_bridge import env as bridge

        # Each replica has pools of its own, and more threads than cores only stand in each other's way.
        compute = max(1, cpu_count // layout.replicas)
        waiting = THREADS_PER_REPLICA * layout.threads
        kind = f"TPU {self.accelerator.generation}" if self.accelerator else "polyxla CPU"
        return {
            **meeting,
            env.PJRT_DEVICE: PREPARED[self.kind],
            env.NPROC: str(compute),
            env.XLA_THREAD_POOL_SIZE: str(max(cpu_count, waiting)),
            bridge.POLYXLA_BRIDGE_REPLICAS: str(layout.replicas),
            bridge.POLYXLA_BRIDGE_PROCESSES: str(layout.process_count),
            bridge.POLYXLA_BRIDGE_PROCESS: str(process),
            bridge.POLYXLA_BRIDGE_PLATFORM: self.kind,
            bridge.POLYXLA_BRIDGE_KIND: kind,
        } | (self._slice(0, 0) if self.accelerator else {})

    def _slice(self, host: int, process: int) -> dict[str, str]:
        """Describe the emulated slice, so that nothing asks the metadata server."""
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
    """Which replica of a plan one is.

    Attributes:
        plan: where all replicas are.
        process: the number of its process.
        thread: its number within the process.
    """

    plan: Plan
    process: int
    thread: int


def say_emulated(plan: Plan) -> None:
    """Print, once, that a TPU is emulated, if it is."""
    if plan.accelerator:
        say_once(
            f"emulating a {plan.accelerator.name} on this machine's CPU: {plan.layout.replicas} replicas, "
            f"{plan.layout}; names and layout are a TPU's, numbers and speed the CPU's"
        )


def _meeting(port: int) -> dict[str, str]:
    from polyxla_bridge import env as bridge

    return {bridge.POLYXLA_BRIDGE_COORDINATOR: f"{LOCALHOST}:{port}"}


def cpu_layout(count: int, environ: Mapping[str, str], started: int | None = None) -> Layout:
    """Lay out CPU replicas: a process each, unless POLYXLA_PJRT_PROCESSES says otherwise.

    Args:
        count: number of replicas.
        environ: where that variable is.
        started: number of processes that torchrun has started; None where it has not.

    Raises:
        UsageError: the replicas cannot be shared equally by that many processes.
    """
    text = environ.get(env.POLYXLA_PJRT_PROCESSES) or str(started or count)
    processes = int(text) if text.isascii() and text.isdecimal() else 0
    if not 1 <= processes <= count or count % processes:
        divisors = [str(number) for number in range(1, count + 1) if count % number == 0]
        raise UsageError(
            f"{count} replicas cannot be shared equally by {text} processes",
            where=f"{env.POLYXLA_PJRT_PROCESSES}={text}",
            fix=f"Write one of {', '.join(divisors)}, or unset it for a process each.",
        )
    return Layout(threads=count // processes, processes=processes)


def tpu_layout(accelerator: AcceleratorType, devices: Sequence[int]) -> Layout:
    """Lay out replicas on some of an emulated slice's devices: as the slice has them if it can be so.

    A process holds a chip, a thread each of its devices. Of a chip's two devices both or one may be
    chosen, but every process holds as many.
    """
    threads = accelerator.threads_per_process
    if len(devices) == accelerator.devices:
        return Layout(threads, accelerator.chips_per_host, accelerator.hosts)
    chips = {device // threads for device in devices}
    if len(chips) * threads == len(devices):
        return Layout(threads, len(chips))
    return Layout(processes=len(devices))


def require_bridge(count: int) -> None:
    """Check that the bridge is installed.

    Raises:
        UsageError: it is not.
    """
    if importlib.util.find_spec("polyxla_bridge") is None:
        raise UsageError(
            f"{count} replicas on the CPU need polyxla-bridge, which is not installed",
            where="devices",
            fix="Install it (pip install polyxla-bridge), or write devices=1.",
        )
