"""Starting the processes of several replicas. Light: heavy modules are imported in those processes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from polyxla.plugin import (
    POLYXLA_COMPILE_CACHE,
    Job,
    refuse_if_device_in_use,
    refuse_inline,
    run_plan,
    say_once,
)
from polyxla_pjrt.plan import PjrtPlace, PjrtPlan

_REPLICAS, _BRIDGE = "polyxla_pjrt.replication", "polyxla_bridge.engine.jax_engine"


def preload(on_chips: bool) -> tuple[str, ...]:
    """Return the modules that the fork server imports; importing them starts nothing.

    Args:
        on_chips: whether the replicas compute on TPU chips, which need no bridge, and hence no JAX.
    """
    # The bridge is looked up and not imported: the launching process itself does not need it.
    has_bridge = importlib.util.find_spec("polyxla_bridge") is not None
    return (_REPLICAS, _BRIDGE) if has_bridge and not on_chips else (_REPLICAS,)


def run_job(job: Job, plan: PjrtPlan) -> list[Any]:
    """Run every replica of `job` and return their results, in the order of processes and threads.

    Raises:
        UsageError: they are requested to run in this process.
    """
    refuse_inline(job.start_method, plan.layout.replicas)
    method = job.process_method or "forkserver"
    if method == "fork" or (plan.kind == "TPU" and _holds_chips()):
        # A fork inherits this process's devices. A TPU's chips belong to one process at a time.
        refuse_if_device_in_use("launch")
    modules = preload(on_chips=not plan.is_bridged)
    return run_plan(job, plan, run=_run_process, method=method, preload=modules)


def _holds_chips() -> bool:
    """Return whether this process has opened TPU chips. Does not import torch_xla."""
    if "torch_xla" not in sys.modules:
        return False
    # Both are loaded already: this process has imported torch_xla.
    import torch
    from torch_xla.core import xla_model

    from polyxla.plugin import first_device_use

    device = torch.device("xla:0")
    return first_device_use.is_in_use() and xla_model.xla_real_devices([device])[0].startswith("TPU")


def _run_process(job: Job, place: PjrtPlace) -> list[Any]:
    """Run the replicas of one process of a launch, in that process."""
    from polyxla_pjrt.replication import run_replicas

    return run_replicas(job, place.plan, place.process)


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
