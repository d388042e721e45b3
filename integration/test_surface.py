"""What users and plugins can name, frozen in surface.txt: a change to it is a change to that file.

``python integration/test_surface.py > integration/surface.txt`` writes it anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polyxla
import polyxla.plugin
import polyxla_training
from polyxla.plugin import env

SURFACE = Path(__file__).with_name("surface.txt")


def names() -> Iterator[str]:
    """Yield the public names of the packages that programs and plugins import."""
    yield from (f"polyxla.{name}" for name in polyxla.__all__)
    yield from (f"polyxla.plugin.{name}" for name in dir(polyxla.plugin))
    yield from (f"polyxla_training.{name}" for name in polyxla_training.__all__)


def options() -> Iterator[str]:
    """Yield each command with each of its options and arguments."""
    import typer

    from polyxla.cli.app import app
    from polyxla.plugin import load_everything

    load_everything().hook.polyxla_add_commands(app=app)
    return _options("polyxla", typer.main.get_command(app))


def _options(path: str, command: Any) -> Iterator[str]:
    for parameter in command.params:
        spelt = "/".join([*parameter.opts, *parameter.secondary_opts])
        yield f"{path} {spelt if parameter.param_type_name == 'option' else parameter.name.upper()}"
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _options(f"{path} {name}", inner)


def variables() -> Iterator[str]:
    """Yield the variables that ``polyxla env`` lists without any of them being set."""
    from polyxla.cli.variables import variables

    return (row["name"] for row in variables({}, env.from_environ({})))


def surface() -> str:
    """Return everything, a line each."""
    return "".join(f"{line}\n" for part in (names(), options(), variables()) for line in sorted(set(part)))


def test_the_surface_is_the_one_that_is_written_down() -> None:
    assert surface() == SURFACE.read_text()


if __name__ == "__main__":
    print(surface(), end="")
