"""A warm process with light imports, in a directory of the test's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polyxla_testing.processes import WAIT_S, is_alive, wait_for_end_of
from polyxla_tools.warm.preparation import Options, start

MODULES = ("json.tool", "numpy.random")


class Machine:
    """The commands of a user with a private directory of sockets."""

    def __init__(self, directory: str) -> None:
        self.command = [sys.executable, "-m", "polyxla"]
        self.environ = {**os.environ, "XDG_RUNTIME_DIR": directory, "PJRT_DEVICE": "CPU"}
        self.environ.pop("POLYXLA_RUNTIME", None)
        self.clients: list[subprocess.Popen[str]] = []
        self.directory = Path(directory) / "polyxla-warm"

    def prepare(self, *modules: str, idle_s: float = 600.0, **variables: str) -> int:
        """Start a warm process that imports `modules`; return its process id."""
        return start(Options("pjrt", (*MODULES, *modules), idle_s), {**self.environ, **variables})

    def run(self, *arguments: Any, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a polyxla command to its end."""
        environ = {**self.environ, **more.pop("environ", {})}
        command = [*self.command, *map(str, arguments)]
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=WAIT_S, check=False, **more
        )

    def start(self, *arguments: Any, **more: Any) -> subprocess.Popen[str]:
        """Start a polyxla command, which is killed after the test."""
        command = [*self.command, *map(str, arguments)]
        client = subprocess.Popen(command, env=self.environ, stdout=subprocess.PIPE, text=True, **more)
        self.clients.append(client)
        return client

    def processes(self) -> list[dict[str, Any]]:
        """Return what the warm processes say of themselves."""
        done = self.run("warm", "status", "--json")
        found: list[dict[str, Any]] = json.loads(done.stdout)["processes"]
        return found

    def served(self) -> int:
        """Return how many jobs the warm processes have forked."""
        return sum(process["jobs_served"] for process in self.processes())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A user without a warm process; those of the test are ended after it."""
    # Deeper than the 107 characters of a socket's address.
    with tempfile.TemporaryDirectory(prefix="deep" * 30) as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        found = Machine(directory)
        yield found
        for client in found.clients:
            client.kill()
            client.communicate()
        for path in found.directory.glob("*-*"):
            end(int(path.name.rpartition("-")[2]))


@pytest.fixture
def warm(machine: Machine) -> Machine:
    """A user with a warm process."""
    machine.prepare()
    return machine


def end(pid: int) -> None:
    """Kill a process and wait until it is gone."""
    if is_alive(pid):
        os.kill(pid, signal.SIGKILL)
        wait_for_end_of([pid])
