"""The hooks of runtime torchtpu. Nothing heavy is imported here."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import Any

from polyxla import hookimpl
from polyxla.plugin import (
    POLYXLA_LIBTPU_HOST,
    Discovery,
    EmulatedTpu,
    Job,
    Replication,
    constants,
    running_fork_server,
    torchrun,
    tpu_env,
)
from polyxla_torchtpu import discovery as torchtpu
from polyxla_torchtpu import env
from polyxla_torchtpu.launching import preload, run_job
from polyxla_torchtpu.plan import TorchTpuPlace, plan_for


@hookimpl
def polyxla_discover_devices(environ: Mapping[str, str], accelerator: str) -> Discovery:
    """Find the attached TPU chips, an emulated TPU, or this machine's CPU."""
    return torchtpu.discover(environ, accelerator)


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
    """Point the program at the emulated libtpu, if the TPU is emulated."""
    return plan_for(environ, discovery.kind, devices).program_environment(environ)


@hookimpl
def polyxla_prepare(environ: Mapping[str, str], discovery: Discovery, devices: tuple[int, ...]) -> None:
    """Start the fork server, which imports torch and TorchTPU while the program does."""
    plan = plan_for(environ, discovery.kind, devices)
    # A single replica runs in the program itself, and torchrun has started its processes.
    if torchrun.process_count(environ) is None and plan.layout.replicas > 1:
        prepared = plan.process_environments(environ, os.cpu_count() or 1)[0]
        running_fork_server(prepared, preload(on_chips=plan.emulated is None))


@hookimpl
def polyxla_preload(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Name what a process is prepared with; it imports torch before all others, without loading TorchTPU."""
    modules = preload(on_chips=not EmulatedTpu.read(environ) and POLYXLA_LIBTPU_HOST not in environ)
    return ("polyxla_torchtpu.unloaded", *modules) if modules else ()


@hookimpl
def polyxla_forked() -> None:
    """Load TorchTPU in a fork as torch's import would have, in the fork's own environment."""
    if unloaded := sys.modules.get("polyxla_torchtpu.unloaded"):
        unloaded.load()


@hookimpl
def polyxla_launch(job: Job) -> list[Any]:
    """Run one replica in this process, or in a fresh one on request; run several in fresh processes."""
    return run_job(job)


@hookimpl
def polyxla_replication(job: Job, place: TorchTpuPlace) -> Replication:
    """Open the device, for the first time in this process."""
    from polyxla_torchtpu.replication import open_replication

    return open_replication(place, job.environ, is_program=job.own_processes)
