"""A plugin that listens to another package's event."""

from polyxla import hookimpl


@hookimpl
def moon_rises(phase: str) -> str:
    return f"received {phase}"
