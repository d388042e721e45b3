"""A runtime that starts nothing: launch returns the job, and the reason names the accelerator."""

from collections.abc import Mapping

from polyxla import hookimpl
from polyxla.contracts.job import ReplicaResult
from polyxla.plugin import Claim, Device, Discovery, Job


@hookimpl
def polyxla_discover_devices(environ: Mapping[str, str], accelerator: str) -> Discovery:
    devices = tuple(Device(index, "ECHO", f"echo device {index}") for index in range(8))
    notes = (environ["ECHO_NOTE"],) if "ECHO_NOTE" in environ else ()
    return Discovery(Claim.FALLBACK, f"accelerator {accelerator}", "ECHO", devices, notes=notes)


@hookimpl
def polyxla_environment(
    environ: Mapping[str, str], discovery: Discovery, devices: tuple[int, ...]
) -> dict[str, str]:
    return {"ECHO_DEVICES": f"{list(devices)} of {len(discovery.devices)}, {environ.get('ECHO_BEFORE')}"}


@hookimpl
def polyxla_launch(job: Job) -> list[ReplicaResult]:
    return [ReplicaResult(0, job)]
