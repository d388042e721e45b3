"""``polyxla report`` and ``polyxla check-replicas``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyxla.cli.output import JsonFlag, RuntimeOption, plain_errors, print_json
from polyxla.console import say

RUNS = "runs"
"""Where `polyxla_training.Trainer` makes a folder for each run."""


def report(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A log_dir; by default the newest below ./runs.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the page here, not into the run.")
    ] = None,
    as_text: Annotated[bool, typer.Option("--text", help="Print the run only, and write no page.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show what a training did: a summary here, and a page with plots that needs nothing but a browser."""
    from polyxla_training.observe.report.run import Run
    from polyxla_training.observe.run_log import newest_run, read_run

    with plain_errors(as_json):
        folder = run or newest_run(RUNS)
        found = Run.of(str(folder), read_run(folder))
        if as_json:
            print_json(found.as_json())
            return
        from polyxla_training.observe.report.text import as_lines

        typer.echo("\n".join(as_lines(found)))
        if as_text:
            return
        from polyxla_training.observe.report.page import render

        page = out or (folder if folder.is_dir() else folder.parent) / "report.html"
        page.write_text(render(found), encoding="utf-8")
        typer.echo(f"wrote {page}")


def check_replicas(
    factory: Annotated[str, typer.Argument(metavar="MODULE:ATTRIBUTE", show_default=False)],
    steps: Annotated[int, typer.Option(help="Optimizer updates of each run.")] = 10,
    devices: Annotated[int, typer.Option(help="Number of replicas to compare with one.")] = 4,
    batch_size: Annotated[int, typer.Option(help="Records in a batch, of all replicas together.")] = 32,
    tolerance: Annotated[float, typer.Option(help="Largest relative difference that passes.")] = 1e-5,
    runtime: RuntimeOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a torch module on one replica and on several, and compare the parameters.

    Exit code 1 when they are further apart than the tolerance.
    """
    from polyxla_training.replica_check import check_replicas as check
    from polyxla_training.replica_check import load_factory

    with plain_errors(as_json):
        made = load_factory(factory)
        found = check(
            made, steps=steps, devices=devices, batch_size=batch_size, tolerance=tolerance, runtime=runtime
        )
    for warning in found.warnings:
        say(warning)
    print_json(found.as_json()) if as_json else typer.echo(found)
    raise typer.Exit(0 if found.within else 1)
