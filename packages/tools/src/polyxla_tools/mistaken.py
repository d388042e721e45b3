"""Commands that are not there: each names the one that is meant, or the package that brings it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import typer

from polyxla import UsageError
from polyxla.plugin import pip_install, plain_errors

MEANT = {"launch": "run", "test": "doctor", "config": "env"}
"""The command that is meant, by the name that is tried. Source: the commands of Accelerate 1.15."""
PACKAGES = {
    "pod": ("polyxla_pod", "polyxla-pod"),
    "worker": ("polyxla_xrt", "polyxla-runtime-xrt"),
    "report": ("polyxla_training", "polyxla-training"),
    "consolidate": ("polyxla_training", "polyxla-training"),
    "check-replicas": ("polyxla_training", "polyxla-training"),
}
"""The module and the distribution of this project that bring a command."""


def add_mistaken(app: typer.Typer) -> None:
    """Add a hidden command for each name; it takes any arguments."""
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    for name, fix in _fixes():
        command = app.command(name, hidden=True, add_help_option=False, context_settings=anything)
        command(_refusal(name, fix))


def _fixes() -> Iterator[tuple[str, str]]:
    for name, meant in MEANT.items():
        yield name, f"Did you mean polyxla {meant}?"
    for name, (module, distribution) in PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            yield name, f"Install the package that brings it: {pip_install(distribution)}"


def _refusal(name: str, fix: str) -> Callable[[], None]:
    def refuse() -> None:
        with plain_errors(as_json=False):
            raise UsageError(f"there is no command {name}", fix=fix)

    return refuse
