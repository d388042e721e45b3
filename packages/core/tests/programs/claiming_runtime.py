"""A runtime with one device. Tests set its variable, its claim and why it is unavailable."""

from collections.abc import Mapping

from polyxla import hookimpl
from polyxla.plugin import Claim, Device, Discovery

VARIABLE = "TOY"
CLAIM = Claim.EXPLICIT
UNAVAILABLE: str | None = None


@hookimpl
def polyxla_discover_devices(environ: Mapping[str, str], accelerator: str) -> Discovery:
    text = environ.get(VARIABLE)
    return Discovery(
        CLAIM if text else Claim.NONE,
        f"{VARIABLE}={text}",
        kind=accelerator,
        devices=(Device(0, "TOY", "toy device 0"),),
        unavailable=UNAVAILABLE,
        fix="Plug it in.",
    )
