"""A runtime without torch, whose devices and claim come from variables."""

from collections.abc import Mapping

from polyxla import hookimpl
from polyxla.plugin import Claim, Device, Discovery, Setting

VARIABLE = "TOY"


@hookimpl
def polyxla_discover_devices(environ: Mapping[str, str]) -> Discovery:
    text = environ.get(VARIABLE)
    return Discovery(
        Claim[environ.get(f"{VARIABLE}_CLAIM", "EXPLICIT")] if text else Claim.NONE,
        f"{VARIABLE}={text}" if text else f"{VARIABLE} is not set",
        "TOY",
        tuple(Device(index, "TOY", f"toy device {index}", index // 4) for index in range(int(text or 1))),
        host_count=2,
        topology="toy-8",
        variables={VARIABLE: Setting(text, "environment" if text else "default")},
    )


@hookimpl
def polyxla_environment(devices: tuple[int, ...]) -> dict[str, str]:
    return {f"{VARIABLE}_VISIBLE": ",".join(map(str, devices))}
