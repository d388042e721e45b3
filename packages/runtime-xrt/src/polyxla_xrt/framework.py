"""The runtime's entry point in torch_xla, for plain torch_xla programs: `import torch_xla` loads it.

If the environment describes a TPU node, torch_xla's devices are its cores, and ``torch_xla.launch`` and
``xmp.spawn`` start a process for each. Otherwise nothing is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch_xla.runtime as xr

from polyxla.plugin import (
    POLYXLA_RUNTIME,
    ended_by_errors,
    first_device_use,
    from_environ,
    handle_launches,
    mend_torch_xla,
    say_once,
    select,
    snapshot,
    unknown_variables,
    update_environ,
)
from polyxla_xrt import env, node
from polyxla_xrt.config.configuration import read_configuration
from polyxla_xrt.config.cores import process_count
from polyxla_xrt.launching import run_job, wants_node
from polyxla_xrt.node import Node
from polyxla_xrt.plan import NodePlan, configured_plan, requested_plan

# The entry point names the class in this module, so that loading it runs `_install` as well.
__all__ = ["Node"]


def prepared_plan(nprocs: int | None = None) -> NodePlan | None:
    """Return the plan of a plain torch_xla program in this environment; None if torch_xla decides.

    Args:
        nprocs: the ``nprocs`` of ``xmp.spawn``: the number of cores, or 1, which torch_xla starts itself.

    Raises:
        UsageError: this many processes cannot share the cores.
    """
    environ = snapshot()
    # A replica starts no further processes, and an SPMD program drives all cores from a single process.
    if not wants_node(environ) or environ.get(env.POLYXLA_XRT_ASSIGNMENT) or xr.is_spmd():
        return None
    plan = configured_plan(environ)
    if nprocs is not None:
        configuration = replace(plan.configuration, devices_per_worker=plan.cores)
        if process_count(configuration, nprocs) < plan.cores:
            return None
    return plan


def _replicas() -> int | None:
    plan = prepared_plan()
    return len(plan.devices) if plan else None


def prepare(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a plain torch_xla program needs; none if `environ` describes no TPU node.

    Raises:
        UsageError: the description of the TPU node is wrong.
    """
    runtime = environ.get(POLYXLA_RUNTIME)
    if runtime not in (None, "", "xrt") or wants_node(environ) or environ.get(env.POLYXLA_XRT_ASSIGNMENT):
        return {}
    # A program that chooses its device itself keeps it.
    if not runtime and environ.get(env.PJRT_DEVICE):
        return {}
    if runtime or env.misspelt(environ):
        # A program that names this runtime must not run on another one. `select` raises the error of
        # `polyxla run`.
        select(environ, from_environ(environ).runtime)
    configuration = read_configuration(environ)
    if configuration is None:
        return {}
    for warning in (*configuration.warnings, *unknown_variables(environ)):
        say_once(warning)
    return requested_plan(configuration, environ).program_environment(environ)


def apply_environment() -> None:
    """Act on this process's environment: at import, and again in a fork with an environment of its own."""
    update_environ(prepare(snapshot()))
    if wants_node(snapshot()):
        node.register()


def _install() -> None:
    with ended_by_errors():
        apply_environment()
    handle_launches("xrt", prepared_plan, run_job)
    mend_torch_xla()
    first_device_use.watch(_replicas)


_install()
