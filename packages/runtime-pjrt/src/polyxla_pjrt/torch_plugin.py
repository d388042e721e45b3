"""The runtime's entry point in torch_xla, which imports this module with itself, also in plain programs.

Where the environment asks for several replicas, ``torch_xla.launch`` and ``xmp.spawn`` start them as
`polyxla.launch` does: prepared processes, real collectives, no silent hang. A program that launches nothing,
such as an SPMD program, keeps torch_xla's own client for the CPU; only the line is recorded that first uses a
device.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from polyxla.env import POLYXLA_RUNTIME, snapshot, update_environ
from polyxla.launcher.processes import ProcessWork
from polyxla.xla import first_device_use
from polyxla.xla.torch_xla_launch import TorchXlaLaunch, handle_launches
from polyxla_pjrt import discovery, env, torchrun
from polyxla_pjrt.emulated_tpu import EmulatedTpu, register_emulated
from polyxla_pjrt.launching import run_plan, run_process, say_uncached
from polyxla_pjrt.layout import PREPARED, Plan

# The entry point names the class in this module, so that loading it runs `_install` as well.
__all__ = ["EmulatedTpu"]


def prepare(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that put a plain torch_xla program on the bridge; none where it is not needed.

    It is needed on an emulated TPU, and in the processes of torchrun on the CPU.

    Raises:
        UsageError: the environment asks for replicas that cannot run.
    """
    if environ.get(POLYXLA_RUNTIME) not in (None, "", "pjrt"):
        return {}
    # Variables that a launcher has set, for the bridge or for one replica, stay as they are.
    prepared = (env.POLYXLA_PJRT_LOCAL_DEVICE, env.PJRT_LOCAL_PROCESS_COUNT)
    if environ.get(env.PJRT_DEVICE) in PREPARED.values() or any(name in environ for name in prepared):
        return {}
    is_started_by_torchrun = torchrun.process_count(environ) is not None
    asks_for_cpu = environ.get(env.PJRT_DEVICE, "CPU" if is_started_by_torchrun else "") == "CPU"
    if not environ.get(env.POLYXLA_EMULATE) and not (asks_for_cpu and is_started_by_torchrun):
        if asks_for_cpu and len(discovery.requested_devices(environ)) == 1:
            say_uncached(environ)
        return {}
    plan = discovery.requested_plan(environ)
    if plan is None:
        say_uncached(environ)
        return {}
    if is_started_by_torchrun:
        return torchrun.environment(plan, environ, os.cpu_count() or 1)
    return plan.program_environment(os.cpu_count() or 1)


def _launch_plan() -> Plan | None:
    """Return the plan of a launch in this process; None where torch_xla decides, as for an SPMD program."""
    return None if xr.is_spmd() else discovery.prepared_plan(snapshot())


def _run(plan: Plan, launched: TorchXlaLaunch) -> list[Any]:
    main = functools.partial(run_process, launched.call, plan)
    work = ProcessWork(main, launched.function, launched.args, snapshot())
    return run_plan(plan, work, launched.method)


def _join_torchrun() -> None:
    """Set up replication in a process that torchrun started, which torch_xla leaves to the script."""
    environ = snapshot()
    if torchrun.process_count(environ) is not None and environ.get(env.PJRT_DEVICE) in PREPARED.values():
        devices: Any = xm.get_xla_supported_devices()
        xm.set_replication(torch_xla.device(), devices)


def _install() -> None:
    update_environ(prepare(snapshot()))
    handle_launches(_launch_plan, _run)
    first_device_use.record(_join_torchrun)
    if snapshot().get(env.PJRT_DEVICE) == PREPARED["TPU"]:
        register_emulated()


_install()
