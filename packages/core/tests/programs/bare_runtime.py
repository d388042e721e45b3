"""A runtime without torch: one process per device, and replications that only know their ordinal."""

from typing import Any

from polyxla import hookimpl
from polyxla.launcher.processes import run_processes
from polyxla.plugin import Claim, Device, Discovery, Job, Replication, World


@hookimpl
def polyxla_discover_devices() -> Discovery:
    devices = tuple(Device(index, "BARE", f"bare device {index}") for index in range(4))
    return Discovery(Claim.EXPLICIT, "the test", "BARE", devices)


@hookimpl
def polyxla_launch(job: Job) -> list[Any]:
    environs = [{**job.environ, "BARE_ORDINAL": str(ordinal)} for ordinal in range(len(job.devices))]
    return run_processes(job, range(len(job.devices)), environs)


Bare: Any = type("Bare", (Replication,), dict.fromkeys(Replication.__abstractmethods__, lambda *_: None))


@hookimpl
def polyxla_replication(job: Job, place: int) -> Any:
    bare = Bare()
    bare.device, bare.kind = None, "BARE"
    size = len(job.devices)
    bare.world = World(size, place, place, size, place, size)
    return bare
