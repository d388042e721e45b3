"""The layout of replicas over hosts, processes and threads, and the environment of each process.

Pure functions: no environment and no files; the search for a free port is the exception.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

from polyxla import UsageError
from polyxla.plugin import LOCALHOST, Layout, free_ports, pip_install, tpu_env
from polyxla_pjrt import env

THREADS_PER_REPLICA = 4
"""Threads that torch_xla's pool must have for each replica of a process. Executions wait in the pool for each
other: a pool full of waiting ones never starts the one they wait for."""
BRIDGED_CPU = "CPU_POLYXLA"
"""The value of ``PJRT_DEVICE`` that chooses the bridge. torch_xla's Python reads it up to the underscore, so
the device keeps its usual name."""


@dataclass(frozen=True)
class Plan:
    """Where the replicas of a job run: on the CPU; `polyxla_pjrt.tpu_plan.TpuPlan` is for TPU cores.

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
    def first_process(self) -> int:
        """The number of the first process that this host starts."""
        return 0

    @property
    def processes_here(self) -> range:
        """The numbers of the processes that this host starts."""
        return range(self.first_process, self.first_process + self.layout.processes)

    @property
    def launching_hosts(self) -> tuple[str, ...]:
        """The hosts whose launches monitor each other; none for CPU replicas, which the bridge monitors."""
        return ()

    @property
    def own_host(self) -> int:
        """The number of this host among them."""
        return 0

    def say(self) -> None:
        """Print what the user should know before the replicas start."""

    def with_own_processes(self) -> Plan:
        """Return the plan in which each replica has a process of its own.

        Raises:
            UsageError: that is impossible; see `polyxla_pjrt.tpu_plan.TpuPlan`.
        """
        return Plan(Layout(1, self.layout.replicas))

    def program_environment(self, environ: Mapping[str, str], cpu_count: int) -> dict[str, str]:
        """Return the variables, over `environ`, for a program that launches the replicas."""
        # The program keeps torch_xla's own client: it may be an SPMD program, which launches nothing.
        return {
            env.PJRT_DEVICE: self.kind,
            env.CPU_NUM_DEVICES: environ.get(env.CPU_NUM_DEVICES) or str(self.layout.replicas),
        }

    def meeting(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Choose what all processes share, such as where they meet: variables over `environ`."""
        from polyxla_bridge import env as bridge

        coordinator, store = free_ports(2)
        # The store is torch.distributed's; torch_xla would choose the same port for all jobs of a machine.
        return {
            bridge.POLYXLA_BRIDGE_COORDINATOR: f"{LOCALHOST}:{coordinator}",
            tpu_env.MASTER_ADDR: LOCALHOST,
            tpu_env.MASTER_PORT: str(store),
        }

    def process_environments(self, environ: Mapping[str, str], cpu_count: int) -> list[dict[str, str]]:
        """Return the complete environment of each process that this host starts, over `environ`."""
        meeting = self.meeting(environ)
        return [
            {**environ, **self.process_environment(process, cpu_count, meeting)}
            for process in self.processes_here
        ]

    def process_environment(self, process: int, cpu_count: int, meeting: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of one process.

        Args:
            process: its number among all processes.
            cpu_count: cores of this machine, which the processes share.
            meeting: what `meeting` has returned in one of the processes.
        """
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
