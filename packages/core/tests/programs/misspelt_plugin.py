"""A plugin with a misspelt hook."""

from polyxla import hookimpl


@hookimpl
def polyxla_step_finishd(step: int) -> None:
    pass
