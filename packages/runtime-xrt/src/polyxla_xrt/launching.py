"""Starting a job's processes, one for each core. Light: heavy modules are imported in those processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyxla.plugin import (
    POLYXLA_DEVICES,
    POLYXLA_SECRET,
    Job,
    Place,
    derived,
    refuse_if_device_in_use,
    refuse_inline,
    run_inline,
    run_processes,
    with_secret,
)
from polyxla_xrt import env
from polyxla_xrt.config.credentials import read_token
from polyxla_xrt.config.variables import find
from polyxla_xrt.lease_holder import LeaseHolder
from polyxla_xrt.own_assignment import leased
from polyxla_xrt.plan import NodePlace, NodePlan


def preload() -> tuple[str, ...]:
    """Return the modules that the fork server imports; importing them starts nothing."""
    return ("polyxla_xrt.replication",)


def run_job(job: Job, plan: NodePlan) -> list[Any]:
    """Run every replica of `job` on this host and return their results, in the order of the processes.

    Raises:
        UsageError: several replicas would have to run in this process.
    """
    refuse_inline(job.start_method, len(plan.devices))
    if job.process_method is None and len(plan.devices) == 1:
        return _run_here(job, plan)
    method = job.process_method or "forkserver"
    # Both cases fail if this process uses the device already: a forked child would inherit a client of gRPC
    # without its threads, and the worker grants nobody the cores that this process holds.
    if method == "fork" or _has_cores(plan):
        refuse_if_device_in_use("launch")
    environ = _with_secret(plan, job.environ)
    # The lease outlives the processes: a worker whose lease ends tells them that the job is over.
    with LeaseHolder(plan, environ) as lease:
        environs = plan.process_environments(environ, lease.worker_address, lease.job, lease.mesh_address)
        places = [Place(plan, process) for process in range(plan.cores)]
        return run_processes(job, places, environs, run=_run_process, method=method, preload=preload())


def _run_here(job: Job, plan: NodePlan) -> list[Any]:
    """Run the one replica in this process, which then holds the worker's core until it ends."""
    # torch_xla's engine reads the devices from here: this replica uses this one device only.
    environ = {**job.environ, POLYXLA_DEVICES: json.dumps(list(plan.devices))}
    return run_inline(replace(job, environ=environ), Place(plan, 0))


def _has_cores(plan: NodePlan) -> bool:
    """Return whether this process itself has leased the cores of the worker that the plan wants."""
    return (own := leased()) is not None and own.address == plan.address


def _run_process(job: Job, place: NodePlace) -> Any:
    from polyxla_xrt.replication import run_replica

    return run_replica(job, place)


def _with_secret(plan: NodePlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the job's secret. Several hosts derive it from their workers' token."""
    token = find(environ, env.POLYXLA_XRT_TOKEN_FILE)
    hosts = plan.configuration.hosts
    # All hosts must have the same secret, and the token is known to all of them.
    if hosts > 1 and token and not environ.get(POLYXLA_SECRET):
        secret = derived(read_token(Path(token.text), token.where), "the job of several hosts")
        return {**environ, POLYXLA_SECRET: secret}
    return with_secret(environ, hosts)


def wants_node(environ: Mapping[str, str]) -> bool:
    """Return whether torch_xla drives a TPU node in a process with this environment."""
    return environ.get(env.PJRT_DEVICE) == env.NODE
