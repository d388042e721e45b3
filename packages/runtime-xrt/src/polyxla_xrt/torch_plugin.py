"""The runtime's entry point in torch_xla, which imports it with itself: plain torch_xla programs come here.

If the environment describes a TPU node, torch_xla's devices are its cores, and ``torch_xla.launch`` and
``xmp.spawn`` start a process for each. Otherwise nothing is changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch_xla._internal import pjrt

import polyxla.env
from polyxla.env import POLYXLA_RUNTIME, from_environ, snapshot
from polyxla.launcher.processes import ProcessWork
from polyxla.plugins.selection import select
from polyxla.xla import first_device_use, torch_xla_launch
from polyxla_xrt import env, node
from polyxla_xrt.config.configuration import read_configuration
from polyxla_xrt.config.cores import process_count
from polyxla_xrt.launching import run_plan, run_process, wants_node
from polyxla_xrt.node import Node
from polyxla_xrt.plan import Plan, configured_plan, requested_plan

# The entry point names the class in this module, so that loading it runs `_install` as well.
__all__ = ["Node"]


def prepared_plan() -> Plan | None:
    """Return the plan of a plain torch_xla program in this environment; None if it describes no TPU node."""
    environ = snapshot()
    return (
        configured_plan(environ)
        if wants_node(environ) and not environ.get(env.POLYXLA_XRT_ASSIGNMENT)
        else None
    )


def prepare(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a plain torch_xla program needs; none if `environ` describes no TPU node.

    Raises:
        UsageError: the description of the TPU node is wrong.
    """
    runtime = environ.get(POLYXLA_RUNTIME)
    if runtime not in (None, "", "xrt") or wants_node(environ) or environ.get(env.POLYXLA_XRT_ASSIGNMENT):
        return {}
    if not runtime and environ.get(env.PJRT_DEVICE):
        return {}
    if runtime or env.misspelt(environ):
        # What names this runtime must not run on another: this raises the error of `polyxla run`.
        select(environ, from_environ(environ).runtime)
    configuration = read_configuration(environ)
    return requested_plan(configuration, environ).program_environment() if configuration else {}


def _run(plan: Plan, launched: torch_xla_launch.TorchXlaLaunch) -> list[Any]:
    main = functools.partial(run_process, launched.call, plan)
    work = ProcessWork(main, launched.function, launched.args, snapshot())
    return run_plan(plan, work, launched.method)


def _allow_all_processes() -> None:
    """Make ``xmp.spawn`` accept the number of cores as its number of processes, as XRT's scripts write it."""
    own: Callable[..., Any] = pjrt.spawn

    @functools.wraps(own)
    def spawn(
        fn: Callable[..., Any], nprocs: int | None = None, start_method: str = "spawn", args: Any = ()
    ) -> Any:
        plan = prepared_plan()
        if plan and nprocs is not None:
            configuration = replace(plan.configuration, devices_per_worker=plan.cores)
            nprocs = 1 if process_count(configuration, nprocs) == 1 < plan.cores else None
        return own(fn, nprocs, start_method, args)

    pjrt.spawn = spawn


def _install() -> None:
    polyxla.env.update_environ(prepare(snapshot()))
    torch_xla_launch.handle_launches(prepared_plan, _run)
    _allow_all_processes()
    first_device_use.record()
    if wants_node(snapshot()):
        node.register()


_install()
