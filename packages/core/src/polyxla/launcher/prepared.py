"""Processes that have imported the heavy modules already, such as those of ``polyxla warm``."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

from polyxla.entry_points import entry_points
from polyxla.launcher.process_handle import Process

GROUP = "polyxla.prepared"
"""Entry-point group of the one installed object that provides them."""


class PreparedProcesses(Protocol):
    """That object. Where none of its processes fits, a process starts in the ordinary way."""

    def run_program(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Run the `command` of a `RunPlan`, and end this process as it ends; return if no process fits."""

    def fork_server(
        self, control: socket.socket, environ: Mapping[str, str], preload: Sequence[str]
    ) -> Process | None:
        """Return a process that serves `control` as `polyxla.launcher.fork_server` does, or None."""


def prepared_processes() -> PreparedProcesses | None:
    """Return the installed object, or None."""
    return next((point.load() for point in entry_points(GROUP)), None)
