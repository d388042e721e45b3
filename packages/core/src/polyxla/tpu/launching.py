"""Starting the processes of a plan, in the launching process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from polyxla.contracts.job import ProcessMethod
from polyxla.launcher.processes import ProcessWork, run_processes
from polyxla.tpu import torchrun
from polyxla.tpu.layout import Plan
from polyxla.tpu.monitor.server import monitored
from polyxla.tpu.secret import with_secret


def run_plan(
    plan: Plan,
    work: ProcessWork,
    *,
    method: ProcessMethod,
    preload: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run every replica of a plan and return their results, in the order of processes and threads.

    In a process that torchrun started, run the replicas of this process and return theirs.

    Args:
        plan: where the replicas run.
        work: run once for each process; returns the results of its replicas.
        method: how the processes are made.
        preload: names of the modules that the fork server imports.
        variables: added to the environment of each process.
    """
    plan.say()
    if torchrun.process_count(work.environ) is not None:
        return torchrun.run_here(work.run, plan, work.environ)
    # Before the monitor starts: it admits only processes that know the secret.
    environ = with_secret(work.environ, len(plan.launching_hosts) or 1)
    with monitored(plan.launching_hosts, plan.own_host, environ) as monitor:
        added = {**(variables or {}), **monitor}
        environs = [own | added for own in plan.process_environments(environ, os.cpu_count() or 1)]
        results = run_processes(work, plan.processes_here, environs, method=method, preload=preload)
    return [result for of_process in results for result in of_process]
