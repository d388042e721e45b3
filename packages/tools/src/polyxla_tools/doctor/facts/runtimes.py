"""The installed runtimes, the one that would be chosen, and its devices, by the core's own rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polyxla import PolyxlaError
from polyxla.plugin import (
    Candidate,
    LaunchSettings,
    Selection,
    child_environment,
    discover_all,
    load_plugins,
    plugin_problems,
    select,
    select_devices,
    unknown_variables,
)


@dataclass(frozen=True)
class RuntimeFacts:
    """The runtimes, and what a launch would do.

    Attributes:
        candidates: every installed runtime.
        selection: the choice; None if there is none.
        error: why there is no choice, or why its devices cannot be used.
        devices: the indices that a launch would use; empty with an error.
        broken: an error text for each broken plugin that is not a runtime.
        misspelt: a warning for each variable of polyxla that does not exist.
    """

    candidates: tuple[Candidate, ...]
    selection: Selection | None
    error: PolyxlaError | None
    devices: tuple[int, ...]
    broken: tuple[str, ...]
    misspelt: tuple[str, ...]


def gather_runtimes(environ: Mapping[str, str], settings: LaunchSettings) -> RuntimeFacts:
    """Ask every runtime for its devices, and select as a launch does. No device is opened.

    Blocks for as long as the metadata server takes, at most about 2 s, and only if there are chips.

    Args:
        environ: the environment to examine.
        settings: the requested runtime and devices.
    """
    selection, error = None, None
    devices: tuple[int, ...] = ()
    try:
        selection = select(environ, settings.runtime)
        devices = select_devices(settings.devices, selection)
        check_environment(environ, selection, devices)
    except PolyxlaError as caught:
        # A worker that cannot be reached, too: what is wrong is what an examination is for.
        error, devices = caught, ()
    return RuntimeFacts(
        candidates=discover_all(environ),
        selection=selection,
        error=error,
        devices=devices,
        broken=tuple(plugin_problems()),
        misspelt=unknown_variables(environ),
    )


def check_environment(environ: Mapping[str, str], selection: Selection, devices: tuple[int, ...]) -> None:
    """Check that a launch on these devices finds all that it needs.

    Raises:
        UsageError: it does not.
    """
    child_environment(load_plugins(selection.runtime), environ, selection, devices)
