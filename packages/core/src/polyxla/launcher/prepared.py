"""Prepared processes, which have imported the heavy modules already; polyxla-warm provides them.

The package that provides them names an object in the entry-point group ``polyxla.prepared``. Without one, or
if none fits, processes start in the ordinary way.
"""

from __future__ import annotations

import importlib.metadata
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

from polyxla.launcher.process_handle import Process

GROUP = "polyxla.prepared"
"""Entry-point group; the name of the entry does not matter."""


class PreparedProcesses(Protocol):
    """The object, or module, that the entry point names. It must not import heavy modules."""

    def run_program(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Run `command`, of `polyxla.cli.run.RunPlan`, and end this process as it ends; return if none fits."""

    def fork_server(
        self, control: socket.socket, environ: Mapping[str, str], preload: Sequence[str]
    ) -> Process | None:
        """Return a process that serves `control` as `polyxla.launcher.fork_server` does, or None."""


def prepared_processes() -> PreparedProcesses | None:
    """Return the object of the first installed package that provides one."""
    for point in importlib.metadata.entry_points(group=GROUP):
        found: PreparedProcesses = point.load()
        return found
    return None
