"""Starting the processes of several replicas. Light: heavy modules are imported in those processes."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from polyxla import UsageError
from polyxla.plugin import (
    POLYXLA_COMPILE_CACHE,
    Job,
    ProcessMethod,
    ProcessWork,
    monitored,
    refuse_if_device_in_use,
    run_processes,
    say_once,
    torchrun,
    with_secret,
)
from polyxla_pjrt.layout import Place, Plan

_REPLICAS, _BRIDGE = "polyxla_pjrt.replicas", "polyxla_bridge.engine.jax_engine"


def preload(on_chips: bool) -> tuple[str, ...]:
    """Return the modules that the fork server imports; importing them starts nothing.

    Args:
        on_chips: whether the replicas compute on TPU chips, which need no bridge, and hence no JAX.
    """
    has_bridge = importlib.util.find_spec("polyxla_bridge") is not None
    return (_REPLICAS, _BRIDGE) if has_bridge and not on_chips else (_REPLICAS,)


def run_job(job: Job, plan: Plan) -> list[Any]:
    """Run every replica of `job` and return their results, in the order of processes and threads.

    Raises:
        UsageError: they are requested to run in this process.
    """
    if job.start_method == "inline":
        raise UsageError(
            f"{plan.layout.replicas} replicas cannot run inline: one that fails could not be stopped",
            where="start_method='inline'",
            fix="Leave start_method out.",
        )
    method = job.process_method or "forkserver"
    if method == "fork" or (plan.kind == "TPU" and _holds_chips()):
        # A fork inherits this process's devices. A TPU's chips belong to one process at a time.
        refuse_if_device_in_use("launch")
    main = functools.partial(run_process, job.run, plan)
    return run_plan(plan, ProcessWork(main, job.function, job.args, job.environ), method)


def _holds_chips() -> bool:
    """Return whether this process has opened TPU chips. Does not import torch_xla."""
    if "torch_xla" not in sys.modules:
        return False
    import torch
    from torch_xla.core import xla_model

    from polyxla.plugin import first_device_use

    device = torch.device("xla:0")
    return first_device_use.is_in_use() and xla_model.xla_real_devices([device])[0].startswith("TPU")


def run_process(replica: Callable[[Place], Any], plan: Plan, process: int) -> list[Any]:
    """Run this process's replicas: what each process of a launch does, as the `main` of its `ProcessWork`."""
    from polyxla_pjrt.replicas import run_replicas

    return run_replicas(replica, plan, process)


def run_plan(plan: Plan, work: ProcessWork, method: ProcessMethod) -> list[Any]:
    """Run every replica of a plan and return their results, in the order of processes and threads.

    In a process that torchrun started, run the replicas of this process and return theirs.
    """
    plan.say()
    if torchrun.process_count(work.environ) is not None:
        return torchrun.run_here(work.run, plan, work.environ)
    modules = preload(on_chips=not plan.is_bridged)
    environ = with_secret(work.environ, len(plan.launching_hosts) or 1)
    with monitored(plan.launching_hosts, plan.own_host, environ) as variables:
        own = plan.process_environments(environ, os.cpu_count() or 1)
        environs = [of_process | variables for of_process in own]
        results = run_processes(work, plan.processes_here, environs, method=method, preload=modules)
    return [result for of_process in results for result in of_process]


def say_uncached(environ: Mapping[str, str]) -> None:
    """Print, once, that torch_xla's own client caches no programs, to a user who asked for a cache.

    Source: https://github.com/pytorch/xla/issues/9094 (it writes programs, and loads none).
    """
    requested = environ.get(POLYXLA_COMPILE_CACHE, "")
    if requested.lower() not in ("", "0", "off"):
        say_once(
            f"{POLYXLA_COMPILE_CACHE}={requested}: no compiled programs are cached here, because torch_xla's "
            "own client cannot load any; several replicas on the CPU, and an emulated TPU's, have a cache"
        )
