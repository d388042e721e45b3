"""The entry point of a replica: connect to the device, notify the listeners, call the user's function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from polyxla import presence, tracebacks
from polyxla.contracts.job import Job, ReplicaResult
from polyxla.contracts.replication import Replication
from polyxla.plugins.manager import PluginManager, load_plugins
from polyxla.plugins.precision_lookup import find_precision
from polyxla.replica.replica import Replica


def run_replica(job: Job, place: Any) -> ReplicaResult:
    """Run one replica of `job`, in its process and thread; return its function's result with its ordinal.

    Args:
        job: the launch.
        place: the runtime's description of the replica, passed to `polyxla_replication`.
    """
    plugins = load_plugins(job.runtime)
    with connected(job, place, plugins) as replication:
        return call(job, replication, plugins)


@contextlib.contextmanager
def connected(job: Job, place: Any, plugins: PluginManager) -> Iterator[Replication]:
    """Connect this replica to its device and to the others. An exception gets a note with its ordinal."""
    ordinal: int | None = None
    try:
        replication: Replication = plugins.hook.polyxla_replication(job=job, place=place)
        ordinal = replication.world.ordinal
        # Closing waits for the device; only then has the replica done its part in all that it submitted.
        with presence.running(ordinal), contextlib.closing(replication):
            yield replication
    except BaseException as error:
        tracebacks.leave_replica(error, describe(ordinal))


def describe(ordinal: int | None) -> str:
    """Return how messages name this replica; None if it has no ordinal yet."""
    return "a replica that could not connect" if ordinal is None else f"the replica with ordinal {ordinal}"


def call(job: Job, replication: Replication, plugins: PluginManager) -> ReplicaResult:
    """Call the job's function with a new `Replica`, and notify the listeners."""
    replica = Replica(replication, plugins, find_precision(plugins, job.precision), job.runtime)
    presence.count_steps(replica.ordinal, lambda: replica.steps)
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


@dataclass
class Membership:
    """A whole process that is a replica, by ``polyxla run --each``: its launches join the job.

    Attributes:
        job: the job.
        replication: this replica's connection.
        summaries: those of the launches that have joined.
    """

    job: Job
    replication: Replication
    summaries: list[Any] = field(default_factory=list)


memberships: list[Membership] = []
"""At most one."""
