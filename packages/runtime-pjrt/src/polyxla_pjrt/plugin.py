"""The hooks of runtime pjrt. Nothing heavy is imported here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from polyxla import hookimpl
from polyxla.plugin import (
    Discovery,
    EmulatedTpu,
    Job,
    Replication,
    constants,
    run_inline,
    run_processes,
    running_fork_server,
    torchrun,
    tpu_env,
)
from polyxla_pjrt import discovery as pjrt
from polyxla_pjrt import env
from polyxla_pjrt.launching import preload, run_job, say_uncached
from polyxla_pjrt.plan import PjrtPlace, plan_for, replica_environment


@hookimpl
def polyxla_discover_devices(environ: Mapping[str, str], accelerator: str) -> Discovery:
    """Find the attached TPU chips, or this machine's CPU."""
    return pjrt.discover(environ, accelerator)


@hookimpl
def polyxla_variables() -> frozenset[str]:
    """Name this runtime's variables, and the bridge's."""
    if importlib.util.find_spec("polyxla_bridge") is None:
        return constants(env, tpu_env)
    from polyxla_bridge import env as bridge

    return constants(env, tpu_env, bridge)


@hookimpl
def polyxla_environment(
    environ: Mapping[str, str], discovery: Discovery, devices: tuple[int, ...]
) -> dict[str, str]:
    """Choose torch_xla's device type, and the chip when a job uses one of several."""
    return replica_environment(environ, discovery, devices)


@hookimpl
def polyxla_prepare(environ: Mapping[str, str], discovery: Discovery, devices: tuple[int, ...]) -> None:
    """Start the fork server, which imports torch_xla while the program does."""
    plan = plan_for(environ, discovery.kind, devices)
    # torchrun's processes are the replicas, and a single replica runs in this process: neither needs a fork.
    if plan and torchrun.process_count(environ) is None:
        running_fork_server(environ, preload(on_chips=not plan.is_bridged))


@hookimpl
def polyxla_preload(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Name what the fork server imports."""
    return preload(on_chips=pjrt.requested_kind(environ) == "TPU" and not EmulatedTpu.read(environ))


@hookimpl
def polyxla_forked() -> None:
    """Re-apply, in a fork with an environment of its own, what the import of torch_xla set up."""
    # Only torch_xla imports it. If it has not yet, it will act on the right environment by itself.
    if framework := sys.modules.get("polyxla_pjrt.framework"):
        framework.apply_environment()


@hookimpl
def polyxla_launch(job: Job) -> list[Any]:
    """Run one replica in this process, or in a fresh one on request; run several in fresh processes."""
    kind = pjrt.requested_kind(job.environ)
    plan = plan_for(job.environ, kind, job.devices)
    if plan is not None:
        if not plan.is_bridged:
            say_uncached(job.environ)
        return run_job(job, plan.with_own_processes() if job.own_processes else plan)
    emulated = EmulatedTpu.read(job.environ)
    if emulated:
        emulated.say("1 replica")
    else:
        say_uncached(job.environ)
    # A single replica needs no process of its own, unless the user asks for one.
    if job.process_method is None:
        return run_inline(job)
    modules = preload(on_chips=kind == "TPU" and not emulated)
    return run_processes(job, [None], [job.environ], method=job.process_method, preload=modules)


@hookimpl
def polyxla_replication(job: Job, place: PjrtPlace | None) -> Replication:
    """Open the device, for the first time in this process or thread."""
    # A job's only replica has no place: no plan was made for it.
    if place is not None:
        from polyxla_pjrt.replication import MultiReplication

        return MultiReplication(place, job.environ)
    from polyxla_pjrt.replication import SingleReplication

    local_device = int(job.environ[env.POLYXLA_PJRT_LOCAL_DEVICE])
    return SingleReplication(job.environ[env.PJRT_DEVICE], local_device, job.environ)
