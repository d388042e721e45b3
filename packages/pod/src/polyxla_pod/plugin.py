"""The plugin of the command line: ``polyxla pod``, and the engines ssh and gcloud."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyxla import hookimpl

if TYPE_CHECKING:
    import typer

    from polyxla_pod.engines import Engine, Target


@hookimpl
def polyxla_add_commands(app: typer.Typer) -> None:
    """Add ``polyxla pod``, whose heavy imports wait until it runs."""
    from polyxla_pod.commands import app as pod

    app.add_typer(pod, name="pod")


@hookimpl
def polyxla_pod(engine: str, target: Target) -> Engine | None:
    """Return the engine ssh or gcloud."""
    from polyxla_pod import engines

    known = {"ssh": engines.SshEngine, "gcloud": engines.GcloudEngine}
    return known[engine](target) if engine in known else None
