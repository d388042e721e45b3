"""The hooks of runtime xrt. Nothing heavy is imported here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from polyxla import hookimpl
from polyxla.plugin import Discovery, Job, Replication, constants, running_fork_server
from polyxla_bridge import env as bridge
from polyxla_xrt import env
from polyxla_xrt.client.probe import check_reachable
from polyxla_xrt.discovery import discover, required_configuration
from polyxla_xrt.launching import preload, run_job
from polyxla_xrt.plan import NodePlace, plan_for


@hookimpl
def polyxla_discover_devices(environ: Mapping[str, str]) -> Discovery:
    """Claim the environment if it holds a complete XRT configuration, valid or not."""
    return discover(environ)


@hookimpl
def polyxla_variables() -> frozenset[str]:
    """Name this runtime's variables, and the bridge's."""
    return constants(env, bridge)


@hookimpl
def polyxla_environment(environ: Mapping[str, str], devices: tuple[int, ...]) -> dict[str, str]:
    """Return the variables by which torch_xla finds the node and looks for no attached TPU."""
    configuration = required_configuration(environ)
    plan = plan_for(configuration, devices)
    if plan.address and not configuration.starts_service:
        # The check comes first, because importing torch_xla would delay the error by seconds.
        check_reachable(plan.address, environ)
    return plan.program_environment(environ)


@hookimpl
def polyxla_prepare(environ: Mapping[str, str]) -> None:
    """Start the fork server, which imports torch_xla while the program imports its modules."""
    running_fork_server(environ, preload())


@hookimpl
def polyxla_preload() -> tuple[str, ...]:
    """Name what the fork server imports."""
    return preload()


@hookimpl
def polyxla_forked() -> None:
    """Re-apply, in a fork with an environment of its own, what the import of torch_xla set up."""
    # Only torch_xla imports it. If it has not yet, it will act on the right environment by itself.
    if framework := sys.modules.get("polyxla_xrt.framework"):
        framework.apply_environment()


@hookimpl
def polyxla_launch(job: Job) -> list[Any]:
    """Run the job, with one process per replica."""
    return run_job(job, plan_for(required_configuration(job.environ), job.devices))


@hookimpl
def polyxla_replication(job: Job, place: NodePlace) -> Replication:
    """Return the replication of this process's replica, which first touches the device."""
    from polyxla_xrt.replication import NodeReplication

    return NodeReplication(place, job.environ)
