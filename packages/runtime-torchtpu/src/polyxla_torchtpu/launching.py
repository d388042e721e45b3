"""Starting a job's processes. Light: heavy modules are imported in those processes."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from polyxla import UsageError
from polyxla.plugin import (
    POLYXLA_LIBTPU_HOST,
    Job,
    Place,
    refuse_inline,
    run_plan,
    share_cores,
    snapshot,
    temporary_environ,
    torchrun,
    tpu_env,
)
from polyxla_torchtpu import env
from polyxla_torchtpu.plan import TorchTpuPlace, TorchTpuPlan, plan_for


def preload(on_chips: bool) -> tuple[str, ...]:
    """Return the modules that the fork server imports; importing them starts nothing.

    Args:
        on_chips: whether the replicas compute on TPU chips. torch loads torch_tpu, which opens libtpu; the
            real one does not work in a fork.
    """
    if on_chips:
        return ()
    return ("polyxla_torchtpu.replication", "polyxla_bridge.engine.jax_engine")


def run_job(job: Job) -> list[Any]:
    """Run every replica of `job` and return their results, in the order of their ranks.

    Raises:
        UsageError: several are requested to run in this process.
    """
    plan = plan_for(job.environ, _kind(job.environ), job.devices)
    plan.say()
    # Its processes are there already. Nothing is launched, so nothing below needs to be checked.
    if torchrun.process_count(job.environ) is not None:
        return torchrun.run_here(job, plan, _run_process)
    if plan.layout.replicas == 1 and job.process_method is None and _can_run_here(plan, job.start_method):
        return _run_inline(job, plan)
    refuse_inline(job.start_method, plan.layout.replicas)
    method = job.process_method or "forkserver"
    if method == "fork":
        _refuse_fork()
    if not plan.is_cpu:
        # A process keeps its chips until it ends, so the replicas could not open them.
        refuse_if_device_in_use(is_emulated=plan.emulated is not None)
    return run_plan(
        job,
        plan,
        run=_run_process,
        method=method,
        preload=preload(on_chips=plan.emulated is None),
        variables={env.TORCH_DEVICE_BACKEND_AUTOLOAD: "0"},
    )


def _run_process(job: Job, place: TorchTpuPlace) -> list[Any]:
    """Run the replica of one process of a launch, in that process."""
    from polyxla_torchtpu.replication import prepare

    prepare(place.plan)
    return _run_replica(job, place)


def _run_replica(job: Job, place: TorchTpuPlace) -> list[Any]:
    """Run a replica. If it fails, say which program was the first to fail: TorchTPU may not say it."""
    share_cores(place.plan, job.environ)
    try:
        return [job.run(place)]
    except Exception as error:
        if place.plan.emulated:
            from polyxla_bridge.errors import first_failures

            for failure in first_failures:
                if failure not in str(error):
                    error.add_note(f"the first program that failed: {failure}")
        raise


def _can_run_here(plan: TorchTpuPlan, start_method: str) -> bool:
    """Return whether this process may open the job's device.

    TorchTPU opens libtpu when it is imported. Where no TPU was emulated then, torch may have counted no
    device of this kind, and it counts only once.

    Raises:
        UsageError: it may not, and the replica is requested to run inline.
    """
    if plan.emulated is None or "torch_tpu" not in sys.modules:
        return True
    from polyxla_bridge import activation

    is_counted = POLYXLA_LIBTPU_HOST in snapshot() or activation.has_client()
    is_emulated = activation.is_active() and is_counted
    if not is_emulated and start_method == "inline":
        raise UsageError(
            "torch was imported here without an emulated TPU, and may have counted the devices already",
            where="start_method='inline'",
            fix=f"Set {tpu_env.POLYXLA_EMULATE}=v5e-1 before the program starts, or leave start_method out.",
        )
    return is_emulated


def _run_inline(job: Job, plan: TorchTpuPlan) -> list[Any]:
    # TorchTPU reads its rank and its chip from the variables that a process of its own would have.
    whole = plan.process_environments(job.environ, os.cpu_count() or 1)[0]
    with temporary_environ(whole):
        return _run_replica(job, Place(plan, 0))


def _kind(environ: Mapping[str, str]) -> str:
    """Return the kind of the job's devices; `polyxla_environment` has prepared it."""
    return "CPU" if POLYXLA_LIBTPU_HOST in environ and not environ.get(tpu_env.POLYXLA_EMULATE) else "TPU"


def _refuse_fork() -> None:
    if "torch_tpu" in sys.modules:
        raise UsageError(
            "this process has loaded TorchTPU, which does not work in a fork of it",
            where="start_method='fork'",
            fix="Leave start_method out: the replicas are then forks of a process prepared for that.",
        )


def refuse_if_device_in_use(is_emulated: bool) -> None:
    """Refuse to launch from a process that has opened the chips: they belong to one process at a time.

    Args:
        is_emulated: whether the chips are emulated.

    Raises:
        UsageError: it has.
    """
    if "torch_tpu" not in sys.modules:
        return
    if _has_client(is_emulated):
        raise UsageError(
            "this process already uses the TPU, whose chips belong to one process at a time",
            where="launch",
            fix="Launch before the first use of a device, or move that into the launched function. "
            "torch.manual_seed is one: use polyxla.seed_everything.",
        )


def _has_client(is_emulated: bool) -> bool:
    if is_emulated:
        from polyxla_bridge import activation

        return activation.has_client()
    import torch

    any_torch: Any = torch
    with warnings.catch_warnings(action="ignore"):
        return torch.accelerator.is_available() and bool(any_torch.tpu.is_initialized())
