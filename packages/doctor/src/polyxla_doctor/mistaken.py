"""Commands that do not exist, and that users of other tools try: each names the one that is meant."""

from __future__ import annotations

from collections.abc import Callable

import typer

from polyxla import UsageError
from polyxla.cli.output import plain_errors

MEANT = {"launch": "run", "test": "doctor", "config": "env"}
"""The command that is meant, by the name that is tried. Source: the commands of Accelerate 1.15."""


def add_mistaken(app: typer.Typer) -> None:
    """Add a hidden command for each name; it takes any arguments."""
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    for name, meant in MEANT.items():
        command = app.command(name, hidden=True, add_help_option=False, context_settings=anything)
        command(_refusal(name, meant))


def _refusal(name: str, meant: str) -> Callable[[], None]:
    def refuse() -> None:
        with plain_errors(as_json=False):
            raise UsageError(f"there is no command {name}", fix=f"Did you mean polyxla {meant}?")

    return refuse
