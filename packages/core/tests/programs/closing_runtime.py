"""The fake runtime with replications that record when they are closed, or that cannot connect."""

from typing import Any

from polyxla import hookimpl
from polyxla.plugin import Job
from polyxla_testing.fake import runtime as fake

closed: list[int] = []
polyxla_discover_devices = fake.polyxla_discover_devices
polyxla_environment = fake.polyxla_environment
polyxla_launch = fake.polyxla_launch


@hookimpl
def polyxla_replication(job: Job, place: Any) -> Any:
    if job.environ.get("CLOSING_FAILS"):
        raise ConnectionRefusedError("nobody listens")
    replication: Any = fake.polyxla_replication(place)
    replication.close = lambda: closed.append(place.world.ordinal)
    return replication
