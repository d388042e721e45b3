"""The commands ``polyxla report``, ``polyxla consolidate`` and ``polyxla check-replicas``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyxla import UsageError
from polyxla.plugin import JsonFlag, RuntimeOption, plain_errors, print_json, say

if TYPE_CHECKING:
    from polyxla_training.storage import RemotePath

RUNS = "runs"
"""Directory in which `polyxla_training.Trainer` makes a directory for each run."""


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="A log_dir, or its URL; default: the newest below ./runs."),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Compare several runs, on one page.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write the page to this file; default: report.html in the run, for a URL in this directory, "
            "and comparison.html in this directory.",
        ),
    ] = None,
    as_text: Annotated[bool, typer.Option("--text", help="Print the summary only; write no page.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print a training run's summary, or a comparison of several; write a page.

    The page is one HTML file with plots. It needs no network.
    """
    from polyxla_training.observe.report.run import LoggedRun
    from polyxla_training.observe.report.text import Comparison, as_lines
    from polyxla_training.observe.run_log import newest_run, read_run
    from polyxla_training.storage import locate

    with plain_errors(as_json):
        if runs and len(runs) > 1 and not compare:
            raise UsageError(
                f"{len(runs)} runs are named, and one is reported at a time",
                where="polyxla report",
                fix=f"To compare them: polyxla report --compare {' '.join(runs)}",
            )
        # Only a report has a default run; a comparison needs names.
        places = [locate(run) for run in runs or ()] or ([] if compare else [newest_run(RUNS)])
        # Read before anything is printed, so that an error in the second run leaves no half report.
        found = [LoggedRun.of(str(place), read_run(place)) for place in places]
        comparison = Comparison.of(found) if compare else None
        if as_json:
            print_json((comparison or found[0]).as_json())
            return
        typer.echo("\n".join(comparison.as_lines() if comparison else as_lines(found[0])))
        # Before the import below: the page needs plotly and jinja2, and the text needs neither.
        if as_text:
            return
        from polyxla_training.observe.report.page import render, render_comparison

        page = out or (Path("comparison.html") if comparison else _page_of(places[0]))
        text = render_comparison(comparison) if comparison else render(found[0])
        page.write_text(text, encoding="utf-8")
        typer.echo(f"wrote {page}")


def _page_of(place: Path | RemotePath) -> Path:
    if not isinstance(place, Path):
        return Path("report.html")
    return (place if place.is_dir() else place.parent) / "report.html"


def consolidate(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="A checkpoint in shards, or its URL.", show_default=False)
    ],
    out: Annotated[
        str | None,
        typer.Option("-o", "--out", metavar="FILE", help="Write this file; default: beside DIR."),
    ] = None,
    key: Annotated[str, typer.Option(help="What to take from the state that was saved.")] = "module",
    as_json: JsonFlag = False,
) -> None:
    """Write the module of a checkpoint in shards to one file.

    The file is a safetensors file with the module's tensors. Needs no TPU.
    """
    from polyxla_training.storage import check_location, locate

    with plain_errors(as_json):
        # Checked before torch is imported, which takes seconds.
        for path in (directory, out):
            if path is not None:
                check_location(path, "polyxla consolidate")
        from polyxla_training.checkpoint.shard_reader import consolidate as put_together

        found = put_together(locate(directory), None if out is None else locate(out), key=key)
    if as_json:
        print_json(asdict(found))
        return
    from polyxla_training.checkpoint.errors import size_text

    typer.echo(f"wrote {found.path}: {found.tensors} tensors, {size_text(found.size_bytes)}")


def check_replicas(
    factory: Annotated[str, typer.Argument(metavar="MODULE:ATTRIBUTE", show_default=False)],
    steps: Annotated[int, typer.Option(help="Number of optimizer updates in each run.")] = 10,
    devices: Annotated[int, typer.Option(help="Number of replicas on this host to compare with one.")] = 4,
    batch_size: Annotated[int, typer.Option(help="Records in a batch, over all replicas.")] = 32,
    tolerance: Annotated[float, typer.Option(help="Largest relative difference that passes.")] = 1e-5,
    runtime: RuntimeOption = None,
    numerics: Annotated[
        bool,
        typer.Option("--numerics", help="Compare exact products of float32 with those of a TPU instead."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Compare training on one replica and several.

    Trains a torch module both ways and compares the parameters. Exits with 1 if they differ by more than the
    tolerance.
    """
    from polyxla_training.replica_check import check_replicas as check
    from polyxla_training.replica_check import load_factory

    with plain_errors(as_json):
        made = load_factory(factory)
        found = check(
            made,
            steps=steps,
            devices=devices,
            batch_size=batch_size,
            tolerance=tolerance,
            runtime=runtime,
            numerics=numerics,
        )
    for warning in found.warnings:
        say(warning)
    print_json(found.as_json()) if as_json else typer.echo(found)
    raise typer.Exit(0 if found.within else 1)
