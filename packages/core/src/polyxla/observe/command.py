"""``polyxla report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyxla.cli import JsonFlag, plain_errors, print_json

RUNS = "runs"
"""Where `polyxla.Trainer` makes a folder for each run."""


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
    from polyxla.observe.report.run import Run
    from polyxla.observe.runlog import newest_run, read_run

    with plain_errors(as_json):
        folder = run or newest_run(RUNS)
        found = Run.of(str(folder), read_run(folder))
        if as_json:
            print_json(found.as_json())
            return
        from polyxla.observe.report.text import as_lines

        typer.echo("\n".join(as_lines(found)))
        if as_text:
            return
        from polyxla.observe.report.page import render

        page = out or (folder if folder.is_dir() else folder.parent) / "report.html"
        page.write_text(render(found), encoding="utf-8")
        typer.echo(f"wrote {page}")
