"""A runtime whose discovery raises."""

from polyxla import Discovery, hookimpl


@hookimpl
def polyxla_discover_devices() -> Discovery:
    raise ValueError("bad day")
