"""A runtime that nothing asks for."""

from polyxla import Claim, Discovery, hookimpl


@hookimpl
def polyxla_discover_devices() -> Discovery:
    return Discovery(Claim.NONE, "never")
