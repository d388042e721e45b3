"""A plugin that adds the command ``hello``."""

import typer

from polyxla import hookimpl


@hookimpl
def polyxla_add_commands(app: typer.Typer) -> None:
    @app.command()
    def hello() -> None:
        print("hello from a plugin")
