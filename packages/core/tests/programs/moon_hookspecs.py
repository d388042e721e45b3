"""The hook specs of a package with an event."""

from polyxla.hookspecs import hookspec


@hookspec
def moon_rises(phase: str) -> str:  # type: ignore[empty-body]
    """Called at moonrise."""
