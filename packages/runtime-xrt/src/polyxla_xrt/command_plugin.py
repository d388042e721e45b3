"""The plugin that adds ``polyxla worker`` to the command line, whichever runtime is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyxla import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def polyxla_add_commands(app: typer.Typer) -> None:
    """Add ``polyxla worker``, whose heavy imports wait until it runs."""
    from polyxla_xrt.commands import app as worker

    app.add_typer(worker, name="worker")
