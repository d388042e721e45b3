"""A runtime that nothing asks for."""

from polyxla import hookimpl
from polyxla.plugin import Claim, Discovery


@hookimpl
def polyxla_discover_devices() -> Discovery:
    return Discovery(Claim.NONE, "never")
