"""A runtime whose discovery raises."""

from polyxla import hookimpl
from polyxla.plugin import Discovery


@hookimpl
def polyxla_discover_devices() -> Discovery:
    raise ValueError("bad day")
