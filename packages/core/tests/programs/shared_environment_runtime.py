"""A runtime that returns the same dictionary of variables each time, and checks that it does not change."""

from polyxla import hookimpl
from polyxla.plugin import Claim, Device, Discovery

VARIABLES = {"A": "1"}


@hookimpl
def polyxla_discover_devices() -> Discovery:
    return Discovery(Claim.NONE, "never", "TOY", (Device(0, "TOY", "toy device 0"),))


@hookimpl
def polyxla_environment() -> dict[str, str]:
    assert len(VARIABLES) == 1
    return VARIABLES
