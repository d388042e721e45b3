"""The hooks of runtime xrt. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyxla import UsageError, hookimpl
from polyxla.plugin import (
    Claim,
    Discovery,
    Job,
    Replication,
    Setting,
    constants,
    import_problem,
    running_fork_server,
)
from polyxla_bridge import env as bridge
from polyxla_xrt import env
from polyxla_xrt.client.probe import check_reachable
from polyxla_xrt.config.configuration import Configuration, read_configuration
from polyxla_xrt.config.variables import find
from polyxla_xrt.launching import PRELOAD, run_job
from polyxla_xrt.plan import Place, found_devices, plan_for


@hookimpl
def polyxla_discover_devices(environ: Mapping[str, str]) -> Discovery:
    """Claim the environment if it holds a complete XRT configuration, valid or not."""
    reason = _reason(environ)
    misspelt = {} if reason else env.misspelt(environ)
    bare = Discovery(
        claim=Claim.CONFIGURED if reason or misspelt else Claim.NONE,
        reason=reason
        or ", ".join(f"{name}={environ[name]}" for name in misspelt)
        or f"{env.XRT_TPU_CONFIG} is not set",
        variables={
            name: Setting(environ[name], "environment") if name in environ else Setting(None, "default")
            for name in env.READ
            if name in env.CHOOSING or name in environ
        },
    )
    if misspelt:
        # The job is meant for a TPU node: it must not run on this machine's CPU instead.
        name, near = next(iter(misspelt.items()))
        fix = f"Did you mean {near}? Unset {name} if this job is not for a TPU node."
        return replace(
            bare, unavailable=f"{name} is not an XRT variable", fix=fix, notes=env.warnings(environ)
        )
    try:
        configuration = read_configuration(environ)
    except UsageError as error:
        origin = f" (from {error.where})" if error.where not in (None, reason) else ""
        wrong = replace(bare, unavailable=f"{error.what}{origin}", fix=error.fix)
        return replace(wrong, notes=env.warnings(environ))
    if configuration is None:
        unset = replace(bare, unavailable="no variable describes a TPU node", fix=_EXAMPLE)
        return replace(unset, notes=env.warnings(environ))
    if problem := import_problem():
        return replace(bare, unavailable=problem.what, fix=problem.fix, notes=configuration.warnings)
    return replace(
        bare,
        kind=configuration.kind,
        devices=found_devices(configuration),
        host_count=configuration.hosts,
        notes=configuration.warnings,
    )


_EXAMPLE = (
    f"Set {env.XRT_TPU_CONFIG}='tpu_worker;0;HOST:8470' for a worker at HOST, or "
    "'localservice;0;localhost:51011' for a worker that polyxla starts on this host."
)


@hookimpl
def polyxla_variables() -> frozenset[str]:
    """Name this runtime's variables, and the bridge's."""
    return constants(env, bridge)


@hookimpl
def polyxla_environment(environ: Mapping[str, str], devices: tuple[int, ...]) -> dict[str, str]:
    """Return the variables by which torch_xla finds the node and looks for no attached TPU."""
    configuration = _configuration(environ)
    plan = plan_for(configuration, devices)
    if plan.address and not configuration.starts_service:
        # Checked now: importing torch_xla first would delay the error by seconds.
        check_reachable(plan.address, environ)
    return plan.program_environment()


@hookimpl
def polyxla_prepare(environ: Mapping[str, str]) -> None:
    """Start the fork server, which imports torch_xla while the program imports its modules."""
    running_fork_server(environ, PRELOAD)


@hookimpl
def polyxla_launch(job: Job) -> list[Any]:
    """Run the job, with one process per replica."""
    return run_job(job, plan_for(_configuration(job.environ), job.devices))


@hookimpl
def polyxla_replication(job: Job, place: Place) -> Replication:
    """Return the replication of this process's replica, which first touches the device."""
    from polyxla_xrt.replicas import NodeReplication

    return NodeReplication(place, job.environ)


def _configuration(environ: Mapping[str, str]) -> Configuration:
    configuration = read_configuration(environ)
    if configuration is None:
        raise UsageError("no variable describes a TPU node", where="--runtime xrt", fix=_EXAMPLE)
    return configuration


def _reason(environ: Mapping[str, str]) -> str | None:
    if config := find(environ, env.XRT_TPU_CONFIG):
        return config.where
    if find(environ, env.XRT_DEVICE_MAP) and find(environ, env.XRT_WORKERS):
        return f"{env.XRT_DEVICE_MAP} with {env.XRT_WORKERS}"
    # A pod's launcher sets only these on the hosts after the first.
    mesh, worker = find(environ, env.XRT_MESH_SERVICE_ADDRESS), find(environ, env.XRT_LOCAL_WORKER)
    return f"{mesh.where} with {worker.where}" if mesh and worker else None
