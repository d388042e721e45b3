"""The hooks of runtime xrt. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyxla import Claim, Discovery, Job, Replication, Setting, UsageError, hookimpl
from polyxla.launcher.start_methods import running_fork_server
from polyxla_xrt import env
from polyxla_xrt.client.probe import check_reachable
from polyxla_xrt.config.configuration import Configuration, read
from polyxla_xrt.config.variables import find
from polyxla_xrt.launching import PRELOAD, run_job
from polyxla_xrt.plan import Place, found_devices, plan_for


@hookimpl
def polyxla_discover_devices(environ: Mapping[str, str]) -> Discovery:
    """Claim the environment when it holds a complete XRT configuration, right or wrong."""
    reason = _reason(environ)
    bare = Discovery(
        claim=Claim.CONFIGURED if reason else Claim.NONE,
        reason=reason or f"{env.XRT_TPU_CONFIG} is not set",
        variables={
            name: Setting(environ[name], "environment") if name in environ else Setting(None, "default")
            for name in env.READ
            if name in env.CHOOSING or name in environ
        },
    )
    try:
        configuration = read(environ)
    except UsageError as error:
        origin = f" (from {error.where})" if error.where not in (None, reason) else ""
        wrong = replace(bare, unavailable=f"{error.what}{origin}", fix=error.fix)
        return replace(wrong, notes=env.remarks(environ))
    if configuration is None:
        unset = replace(bare, unavailable="no variable describes a TPU node", fix=_EXAMPLE)
        return replace(unset, notes=env.remarks(environ))
    return replace(
        bare,
        kind=configuration.kind,
        devices=found_devices(configuration),
        host_count=configuration.hosts,
        notes=configuration.warnings,
    )


_EXAMPLE = (
    f"Set {env.XRT_TPU_CONFIG}='tpu_worker;0;HOST:8470' for a worker at HOST, or "
    "'localservice;0;localhost:51011' for one that is started here."
)


@hookimpl
def polyxla_environment(environ: Mapping[str, str], devices: tuple[int, ...]) -> dict[str, str]:
    """Let torch_xla find the node, and nothing ask for a TPU that is attached here."""
    configuration = _configuration(environ)
    plan = plan_for(configuration, devices)
    if plan.address and not configuration.starts_service:
        # Now, and not when torch_xla has been imported.
        check_reachable(plan.address, environ)
    return plan.program_environment()


@hookimpl
def polyxla_prepare(environ: Mapping[str, str]) -> None:
    """Let the fork server import torch_xla while the program does."""
    running_fork_server(environ, PRELOAD)


@hookimpl
def polyxla_launch(job: Job) -> list[Any]:
    """Run each replica in a process of its own."""
    return run_job(job, plan_for(_configuration(job.environ), job.devices))


@hookimpl
def polyxla_replication(job: Job, place: Place) -> Replication:
    """Touch the device, for the first time in this process."""
    from polyxla_xrt.replicas import NodeReplication

    return NodeReplication(place)


def _configuration(environ: Mapping[str, str]) -> Configuration:
    configuration = read(environ)
    if configuration is None:
        raise UsageError("no variable describes a TPU node", where="--runtime xrt", fix=_EXAMPLE)
    return configuration


def _reason(environ: Mapping[str, str]) -> str | None:
    if config := find(environ, env.XRT_TPU_CONFIG):
        return config.where
    if find(environ, env.XRT_DEVICE_MAP) and find(environ, env.XRT_WORKERS):
        return f"{env.XRT_DEVICE_MAP} with {env.XRT_WORKERS}"
    # All that a pod's launcher gives the hosts after the first.
    mesh, worker = find(environ, env.XRT_MESH_SERVICE_ADDRESS), find(environ, env.XRT_LOCAL_WORKER)
    return f"{mesh.where} with {worker.where}" if mesh and worker else None
