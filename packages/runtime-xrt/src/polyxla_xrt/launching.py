"""Starting a job's processes, one for each core. Light: what is heavy is imported in those processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from polyxla import Job, UsageError
from polyxla.contracts.job import ProcessMethod
from polyxla.env import POLYXLA_DEVICES
from polyxla.launcher.processes import run_inline, run_processes
from polyxla.xla import refuse_touched
from polyxla_xrt import env
from polyxla_xrt.lease_holder import Coordinator
from polyxla_xrt.plan import Plan

PRELOAD = ("polyxla_xrt.replicas",)
"""What a replica's process imports, and what starts nothing. One list for all, hence one fork server."""


@dataclass(frozen=True)
class Seat:
    """Which replica of a plan one is.

    Attributes:
        plan: where all replicas are.
        process: the number of its process on this host.
    """

    plan: Plan
    process: int


@dataclass(frozen=True)
class ReplicaOfProcess:
    """What each process does: be one replica.

    Attributes:
        replica: what a replica does; it is given its seat.
        plan: where all replicas are.
        function: what the person asked for, to be named in errors.
        args: its arguments, to be named in errors.
        environ: the environment that holds the limits of waiting.
    """

    replica: Callable[[Seat], Any]
    plan: Plan
    function: Callable[..., Any]
    args: tuple[Any, ...]
    environ: Mapping[str, str]

    def run(self, process: int) -> Any:
        """Be that process, and return its replica's result."""
        from polyxla_xrt.replicas import run_replica

        return run_replica(self.replica, Seat(self.plan, process))


def run_job(job: Job, plan: Plan) -> list[Any]:
    """Run every replica of `job` on this host and return their results in ordinal order.

    Raises:
        UsageError: several are asked to run in this process.
    """
    if job.start_method == "inline" and len(plan.devices) > 1:
        raise UsageError(
            f"{len(plan.devices)} replicas cannot run inline: on a TPU node each is a process",
            where="start_method='inline'",
            fix="Leave start_method out.",
        )
    if job.process_method is None and len(plan.devices) == 1:
        return _run_here(job, plan)
    method = job.process_method or "forkserver"
    if method == "fork" or _has_cores(plan):
        refuse_touched("launch")
    return run_plan(ReplicaOfProcess(job.run, plan, job.function, job.args, job.environ), method)


def _run_here(job: Job, plan: Plan) -> list[Any]:
    """Run the one replica in this process, which then has the worker's core until it ends."""
    # Where torch_xla comes to its device, it is to ask for this one and no other.
    environ = {**job.environ, POLYXLA_DEVICES: json.dumps(list(plan.devices))}
    return run_inline(replace(job, environ=environ), Seat(plan, 0))


def _has_cores(plan: Plan) -> bool:
    """Return whether this process itself has the cores of the worker that the plan wants."""
    module = sys.modules.get("polyxla_xrt.torch_plugin")
    return module is not None and module.held_address() == plan.address


def run_plan(work: ReplicaOfProcess, method: ProcessMethod) -> list[Any]:
    """Run every replica of a plan on this host and return their results in ordinal order."""
    with Coordinator(work.plan, work.environ) as meeting:
        environs = work.plan.each(work.environ, meeting.address, meeting.job, meeting.mesh)
        return run_processes(work, range(len(environs)), environs, method=method, preload=PRELOAD)


def wants_node(environ: Mapping[str, str]) -> bool:
    """Return whether torch_xla is to drive a TPU node in a process with this environment."""
    return environ.get(env.PJRT_DEVICE) == env.NODE
