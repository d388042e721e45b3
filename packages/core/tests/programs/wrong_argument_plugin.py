"""A plugin with an argument that its hook does not have."""

from polyxla import hookimpl


@hookimpl
def polyxla_step_finished(stepp: int) -> None:
    pass
