"""The plugin that adds ``polyxla doctor``, ``polyxla fits`` and ``polyxla warm`` to the command line."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from polyxla import UsageError, hookimpl

if TYPE_CHECKING:
    import typer

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


@hookimpl
def polyxla_add_commands(app: typer.Typer) -> None:
    """Add the commands, whose heavy imports wait until they run, and hints for mistaken names."""
    from polyxla_tools.doctor.command import doctor
    from polyxla_tools.fits.command import fits
    from polyxla_tools.warm.commands import app as warm

    app.command()(doctor)
    app.command(context_settings={"ignore_unknown_options": True})(fits)
    app.add_typer(warm, name="warm")
    add_mistaken(app)


def add_mistaken(app: typer.Typer) -> None:
    """Add a hidden command for each mistaken name; it takes any arguments."""
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    for name, fix in _fixes():
        command = app.command(name, hidden=True, add_help_option=False, context_settings=anything)
        command(_refusal(name, fix))


def _fixes() -> Iterator[tuple[str, str]]:
    for name, meant in MEANT.items():
        yield name, f"Did you mean polyxla {meant}?"
    from polyxla.plugin import pip_install

    for name, (module, distribution) in PACKAGES.items():
        # An installed package adds the command itself.
        if importlib.util.find_spec(module) is None:
            yield name, f"Install the package that brings it: {pip_install(distribution)}"


def _refusal(name: str, fix: str) -> Callable[[], None]:
    def refuse() -> None:
        from polyxla.plugin import plain_errors

        with plain_errors(as_json=False):
            raise UsageError(f"there is no command {name}", fix=fix)

    return refuse
