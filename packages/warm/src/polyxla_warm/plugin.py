"""The plugin that adds ``polyxla warm`` to the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyxla import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def polyxla_add_commands(app: typer.Typer) -> None:
    """Add ``polyxla warm``, whose other imports wait until it runs."""
    from polyxla_warm.commands import app as warm

    app.add_typer(warm, name="warm")
