"""Starting the processes of several replicas. Light: what is heavy is imported in those processes."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from polyxla import Job, UsageError
from polyxla.console import say_once
from polyxla.contracts.job import ProcessMethod
from polyxla.env import POLYXLA_COMPILE_CACHE
from polyxla.launcher.processes import run_processes
from polyxla.xla import refuse_touched
from polyxla_pjrt import torchrun
from polyxla_pjrt.layout import Plan

_BRIDGE = ("polyxla_bridge.engine.jax_engine",) if importlib.util.find_spec("polyxla_bridge") else ()
PRELOAD = ("polyxla_pjrt.replicas", *_BRIDGE)
"""What a replica's process imports, and what starts nothing. One list for all, hence one fork server."""


@dataclass(frozen=True)
class Place:
    """Which replica of a plan one is.

    Attributes:
        plan: where all replicas are.
        process: the number of its process.
        thread: its number within the process.
    """

    plan: Plan
    process: int
    thread: int


@dataclass(frozen=True)
class ReplicasOfProcess:
    """What each process does: run all of its replicas.

    Attributes:
        replica: what a replica does; it is given its place.
        plan: where all replicas are.
        function: what the person asked for, to be named in errors.
        args: its arguments, to be named in errors.
        environ: the environment that holds the limits of waiting.
    """

    replica: Callable[[Place], Any]
    plan: Plan
    function: Callable[..., Any]
    args: tuple[Any, ...]
    environ: Mapping[str, str]

    def run(self, process: int) -> list[Any]:
        """Be that process, and return its replicas' results in ordinal order."""
        from polyxla_pjrt.replicas import run_replicas

        return run_replicas(self.replica, self.plan, process)


def run_job(job: Job, plan: Plan) -> list[Any]:
    """Run every replica of `job` and return their results in ordinal order.

    Raises:
        UsageError: they are asked to run in this process.
    """
    if job.start_method == "inline":
        raise UsageError(
            f"{plan.layout.replicas} replicas cannot run inline: one that fails could not be stopped",
            where="start_method='inline'",
            fix="Leave start_method out.",
        )
    method = job.process_method or "forkserver"
    if method == "fork":
        # The others are fresh, and what this process uses is its own.
        refuse_touched("launch")
    return run_plan(ReplicasOfProcess(job.run, plan, job.function, job.args, job.environ), method)


def run_plan(work: ReplicasOfProcess, method: ProcessMethod) -> list[Any]:
    """Run every replica of a plan and return their results in ordinal order.

    In a process of torchrun's, run those of this process, and return theirs.
    """
    plan = work.plan
    say_emulated(plan)
    if torchrun.process_count(work.environ) is not None:
        return torchrun.run_here(work.run, plan, work.environ)
    environs = plan.each(work.environ, os.cpu_count() or 1)
    first = plan.first_process
    places = range(first, first + len(environs))
    results = run_processes(work, places, environs, method=method, preload=PRELOAD)
    return [result for of_process in results for result in of_process]


def say_emulated(plan: Plan) -> None:
    """Say, once, that a TPU is emulated, if it is."""
    if plan.accelerator:
        say_once(
            f"emulating a {plan.accelerator.name} on this machine's CPU: {plan.layout.replicas} replicas, "
            f"{plan.layout}; names and layout are a TPU's, numbers and speed the CPU's"
        )


def say_uncached(environ: Mapping[str, str]) -> None:
    """Say, once, that no programs are kept on torch_xla's own client, to a person who asked for it.

    Source: https://github.com/pytorch/xla/issues/9094 (it writes programs, and loads none).
    """
    asked = environ.get(POLYXLA_COMPILE_CACHE, "")
    if asked.lower() not in ("", "0", "off"):
        say_once(
            f"{POLYXLA_COMPILE_CACHE}={asked}: no compiled programs are kept here, because torch_xla's own "
            "client cannot load any; several replicas on the CPU, and an emulated TPU's, have one that can"
        )
