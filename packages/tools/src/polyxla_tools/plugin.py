"""The plugin that adds ``polyxla doctor``, ``polyxla fits`` and ``polyxla warm`` to the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyxla import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def polyxla_add_commands(app: typer.Typer) -> None:
    """Add the commands, whose heavy imports wait until they run."""
    from polyxla_tools.doctor.command import doctor
    from polyxla_tools.fits.command import fits
    from polyxla_tools.warm.commands import app as warm

    app.command()(doctor)
    app.command(context_settings={"ignore_unknown_options": True})(fits)
    app.add_typer(warm, name="warm")
