"""A plugin that adds its module's name to a list of commands."""

from polyxla import hookimpl


@hookimpl
def polyxla_add_commands(app: list[str]) -> None:
    app.append(__name__)
