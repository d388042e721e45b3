"""The entry point of a replica: connect to the device, notify the listeners, call the user's function."""

from __future__ import annotations

import contextlib
from typing import Any

from polyxla import presence, tracebacks
from polyxla.contracts.job import Job, ReplicaResult
from polyxla.plugins.manager import PluginManager, load_plugins
from polyxla.plugins.precision_lookup import find_precision
from polyxla.replica.replica import Replica


def run_replica(job: Job, place: Any) -> ReplicaResult:
    """Run one replica of `job` and return its function's result with its ordinal.

    Called by `Job.run`, in the replica's process and thread. An exception gets a note that names the replica
    and its host.

    Args:
        job: the launch.
        place: the runtime's description of the replica, passed to `polyxla_replication`.
    """
    ordinal: int | None = None
    try:
        plugins = load_plugins(job.runtime)
        policy = find_precision(plugins, job.precision)
        replication = plugins.hook.polyxla_replication(job=job, place=place)
        ordinal = replication.world.ordinal
        # Closing waits for the device; only then has the replica done its part in all that it submitted.
        with presence.running(ordinal) as count_steps, contextlib.closing(replication):
            replica = Replica(replication, plugins, policy, job.runtime)
            count_steps(lambda: replica.steps)
            return _call(job, replica, plugins)
    except BaseException as error:
        who = "a replica that could not connect" if ordinal is None else f"the replica with ordinal {ordinal}"
        tracebacks.note_replica(error, who)
        raise


def _call(job: Job, replica: Replica, plugins: PluginManager) -> ReplicaResult:
    failure: BaseException | None = None
    replica.seed_device(job.seed)
    plugins.hook.polyxla_replica_started(replica=replica)
    try:
        value = job.function(replica, *job.args)
        summaries = plugins.hook.polyxla_replica_summary(replica=replica)
        return ReplicaResult(replica.ordinal, value, summaries)
    except BaseException as error:
        failure = error
        raise
    finally:
        plugins.hook.polyxla_replica_stopped(replica=replica, error=failure)
