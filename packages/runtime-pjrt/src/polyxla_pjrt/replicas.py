"""Several replicas on this machine's CPU: what their process needs, and how it is started."""

from __future__ import annotations

import importlib.util
import socket
from typing import Any

from polyxla import Job, UsageError
from polyxla_pjrt import env

THREADS_PER_REPLICA = 4
"""How many threads XLA's pools must have for each replica of a process: its collectives wait in them,
and a pool that is full of waiting ones never starts the one they wait for."""


def threads_environment(count: int, cpu_count: int) -> dict[str, str]:
    """Return what a process that holds `count` replicas must find in its environment.

    Raises:
        UsageError: the bridge, which they meet through, is not installed.
    """
    if importlib.util.find_spec("polyxla_bridge") is None:
        raise UsageError(
            f"{count} replicas on the CPU need polyxla-bridge, which is not installed",
            where="devices",
            fix="Install it (pip install polyxla-bridge), or write devices=1.",
        )
    from polyxla_bridge import env as bridge

    threads = str(max(cpu_count, THREADS_PER_REPLICA * count))
    return {
        env.PJRT_DEVICE: bridge.PJRT_CPU,
        env.NPROC: threads,
        env.XLA_THREAD_POOL_SIZE: threads,
        bridge.POLYXLA_BRIDGE_REPLICAS: str(count),
        bridge.POLYXLA_BRIDGE_COORDINATOR: f"127.0.0.1:{_free_port()}",
    }


def run_threads(job: Job) -> list[Any]:
    """Run a job of several replicas in one fresh process, a thread each.

    Raises:
        UsageError: they are asked to run in this process.
    """
    from polyxla.processes import run_processes

    if job.start_method == "inline":
        raise UsageError(
            f"{len(job.devices)} replicas cannot run inline: one that fails could not be stopped",
            where="start_method='inline'",
            fix="Leave start_method out.",
        )
    (results,) = run_processes(_Replicas(job), [None], [job.environ])
    return list(results)


class _Replicas:
    """A job as the process that holds all of its replicas runs it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.function, self.args, self.environ = job.function, job.args, job.environ

    def run(self, place: None) -> list[Any]:
        """Be that process; torch_xla is imported here and not where this was made."""
        from polyxla_pjrt.threads import run_replicas

        return run_replicas(self.job)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
