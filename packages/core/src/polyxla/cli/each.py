"""``polyxla run --each``: run the program once in every replica, with torchrun's variables."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

from polyxla import env
from polyxla.cli import script
from polyxla.cli.run import RunPlan
from polyxla.contracts.job import Job, ReplicaResult
from polyxla.env import Setting
from polyxla.errors import UsageError
from polyxla.launcher import replica_main
from polyxla.launcher.ports import LOCALHOST, free_ports
from polyxla.plugins.manager import load_plugins


def run_each(plan: RunPlan, environ: Mapping[str, str]) -> NoReturn:
    """Run the program in every replica, wait for all, and exit with the code of the first that fails."""
    # On several hosts, the user says where torch.distributed's store is. Some runtimes choose another port.
    one_host = plan.selection.discovery.host_count == 1
    store = {"MASTER_ADDR": LOCALHOST, "MASTER_PORT": str(free_ports(1)[0])} if one_host else {}
    job = Job(
        main=_run_program,
        function=script.run,
        # The program and its arguments, without python -m polyxla.cli.script.
        args=(plan.command[3:],),
        runtime=plan.selection.runtime,
        devices=plan.devices,
        environ={**store, **plan.program_environment(environ)},
        precision=Setting(None, "default"),
        start_method="forkserver",
        own_processes=True,
    )
    plugins = load_plugins(job.runtime)
    try:
        results: list[ReplicaResult] = plugins.hook.polyxla_launch(job=job)
    except Exception as error:
        script.fail(error)
    plugins.hook.polyxla_launch_finished(summaries={result.ordinal: result.summaries for result in results})
    sys.exit(0)


def _run_program(job: Job, place: Any) -> ReplicaResult:
    """Run the program in a replica, whose process is the replica from now on."""
    with replica_main.connected(job, place, load_plugins(job.runtime)) as replication:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                f"runtime {job.runtime!r} puts several replicas into a process, not a program into each",
                where="--each",
                fix="Launch the replicas in the program, by polyxla.launch.",
            )
        world = replication.world
        numbers = {"RANK": world.ordinal, "LOCAL_RANK": world.local_ordinal}
        numbers |= {"WORLD_SIZE": world.world_size, "LOCAL_WORLD_SIZE": world.local_world_size}
        # Only after connecting: a TPU's ordinals are known once its processes have met.
        env.update_environ({name: str(number) for name, number in numbers.items()})
        own = replica_main.Membership(job, replication)
        replica_main.memberships.append(own)
        # Connecting has imported torch_xla if the runtime is on it. A program without it must not pay for its
        # import.
        if "torch_xla" in sys.modules:
            from polyxla.xla import torch_xla_launch

            torch_xla_launch.join()
        try:
            job.function(*job.args)
        except SystemExit as end:
            # For a program, unlike a launched function, sys.exit(0) is a normal end.
            if end.code not in (None, 0):
                raise
        return ReplicaResult(world.ordinal, None, own.summaries)
