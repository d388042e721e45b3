"""Shared by all subcommands: common options, errors on one line, tables and JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

import polyxla
from polyxla.console import say
from polyxla.errors import PolyxlaError

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
RuntimeOption = Annotated[str | None, typer.Option("--runtime", metavar="NAME", help="Runtime to use.")]


@contextlib.contextmanager
def plain_errors(as_json: bool) -> Iterator[None]:
    """Print polyxla's errors on one line, with `as_json` as a JSON document too, and exit with their code."""
    try:
        yield
    except PolyxlaError as error:
        say(f"error: {error}")
        if as_json:
            print_json(described(error))
        # typer would print a traceback of any other exception.
        raise typer.Exit(error.exit_code) from None


def described(error: PolyxlaError | None) -> dict[str, Any]:
    """Return what a JSON document says of an error, or of no error, and of polyxla's release."""
    parts = {name: getattr(error, name, None) for name in ("what", "where", "fix")}
    return {"error": error and str(error), **parts, "version": polyxla.__version__}


def print_json(document: Any) -> None:
    """Print one JSON document on standard output."""
    typer.echo(json.dumps(document, indent=2))


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table on standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    # Files and pipes have no width to fit, and folded cells are hard to search.
    width = None if sys.stdout.isatty() else 200
    # Without emoji=False, rich makes an emoji of ":100:" in a line or a path.
    Console(width=width, highlight=False, markup=False, emoji=False).print(table)
