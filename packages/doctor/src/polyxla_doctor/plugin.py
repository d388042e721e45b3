"""The plugin that adds ``polyxla doctor`` to the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyxla import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def polyxla_add_commands(app: typer.Typer) -> None:
    """Add ``polyxla doctor``, whose other imports wait until it runs, and hints for mistaken names."""
    from polyxla_doctor.command import doctor
    from polyxla_doctor.mistaken import add_mistaken

    app.command()(doctor)
    add_mistaken(app)
