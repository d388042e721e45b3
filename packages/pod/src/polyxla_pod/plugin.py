"""The plugin of the command line: ``polyxla pod``, and the transports ssh and gcloud."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyxla import hookimpl

if TYPE_CHECKING:
    import typer

    from polyxla_pod.transports import Target, Transport


@hookimpl
def polyxla_add_commands(app: typer.Typer) -> None:
    """Add ``polyxla pod``, whose heavy imports wait until it runs."""
    from polyxla_pod.commands import app as pod

    app.add_typer(pod, name="pod")


@hookimpl
def polyxla_pod(transport: str, target: Target) -> Transport | None:
    """Return the transport ssh or gcloud."""
    from polyxla_pod import transports

    known = {"ssh": transports.SshTransport, "gcloud": transports.GcloudTransport}
    return known[transport](target) if transport in known else None
