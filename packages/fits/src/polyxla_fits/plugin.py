"""The plugin that adds ``polyxla fits`` to the command line, whichever runtime is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyxla import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def polyxla_add_commands(app: typer.Typer) -> None:
    """Add ``polyxla fits``, whose heavy imports wait until it runs."""
    from polyxla_fits.command import fits

    app.command(context_settings={"ignore_unknown_options": True})(fits)
