"""Starting the processes of a plan, and what each of them then takes of the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyxla.contracts.job import Job, ProcessMethod
from polyxla.launcher.processes import run_processes
from polyxla.tpu import torchrun
from polyxla.tpu.layout import Place, Plan, PlanT
from polyxla.tpu.monitor.server import monitored
from polyxla.tpu.secret import with_secret

THREAD_NUMBERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that choose torch's number of threads. Source: ``torch.__config__.parallel_info()``."""


def run_plan(
    job: Job,
    plan: PlanT,
    *,
    run: Callable[[Job, Place[PlanT]], list[Any]],
    method: ProcessMethod,
    preload: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run every replica of a job and return their results, in the order of processes and threads.

    In a process that torchrun started, run the replicas of this process and return theirs.

    Args:
        job: the job.
        plan: where the replicas run.
        run: called once in each process, with the place of its first replica; returns the results of all its
            replicas.
        method: how the processes are made.
        preload: names of the modules that the fork server imports.
        variables: added to the environment of each process.
    """
    plan.say()
    if torchrun.process_count(job.environ) is not None:
        return torchrun.run_here(job, plan, run)
    # Before the monitor starts: it admits only processes that know the secret.
    environ = with_secret(job.environ, len(plan.launching_hosts) or 1)
    with monitored(plan.launching_hosts, plan.own_host, environ, plan.slices) as monitor:
        added = {**(variables or {}), **monitor}
        environs = [own | added for own in plan.process_environments(environ, os.cpu_count() or 1)]
        places = [Place(plan, process) for process in plan.processes_here]
        each = plan.layout.process_count // plan.slices
        slices = [process // each for process in plan.processes_here] if plan.slices > 1 else ()
        results = run_processes(job, places, environs, run=run, method=method, preload=preload, slices=slices)
    return [result for of_process in results for result in of_process]


def share_cores(plan: Plan, environ: Mapping[str, str]) -> None:
    """Give torch's own operations on the host as many threads as this process has cores.

    Each process calls it, once it may import torch.

    With a thread for each core in each process, they take the cores from the replicas' devices: between two
    operations, a thread of OpenMP spins. torchrun gives each process one thread. A number that the user has
    chosen, by a variable or in the program, stays if it is not higher.

    Args:
        plan: where the replicas run.
        environ: variables of the launching process.
    """
    processes = len(plan.processes_here)
    if processes == 1 or any(name in environ for name in THREAD_NUMBERS):
        return
    import torch

    share = max(1, len(os.sched_getaffinity(0)) // processes)
    if torch.get_num_threads() > share:
        torch.set_num_threads(share)
