"""Crews of real processes that meet over real sockets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polyxla_xrt.server.app import MeshServer

PARTICIPANT = Path(__file__).with_name("mesh_participant.py")


class Crew:
    """Processes by ordinal; with no address, that of ordinal 0 serves."""

    def __init__(self, world_size: int, address: str | None = None) -> None:
        self.world_size = world_size
        self.processes: list[subprocess.Popen[str]] = []
        try:
            if address is None:
                self._start(0, "127.0.0.1:0")
                address = self.read(0)["address"]
            self.address = address
            others = range(len(self.processes), world_size)
            for ordinal in others:
                self._start(ordinal, address)
            for ordinal in others:
                self.read(ordinal)
        except BaseException:
            self.end()
            raise

    def _start(self, ordinal: int, address: str) -> None:
        command = [sys.executable, str(PARTICIPANT), address, str(ordinal), str(self.world_size)]
        pipe = subprocess.PIPE
        self.processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1))

    def send(self, ordinal: int, order: Any) -> None:
        stdin = self.processes[ordinal].stdin
        assert stdin is not None
        stdin.write(json.dumps(order) + "\n")

    def read(self, ordinal: int) -> dict[str, Any]:
        stdout = self.processes[ordinal].stdout
        assert stdout is not None
        found: dict[str, Any] = json.loads(stdout.readline())
        return found

    def meet(self, ordinal: int, tag: str, replicas: tuple[int, ...] = (), timeout_s: float = 30) -> None:
        self.send(ordinal, {"tag": tag, "payload": f"{tag}{ordinal}", "replicas": replicas, "s": timeout_s})

    def meet_all(self, tag: str, who: tuple[int, ...], replicas: tuple[int, ...] = ()) -> list[Any]:
        for ordinal in who:
            self.meet(ordinal, tag, replicas)
        return [self.read(ordinal) for ordinal in who]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()


@pytest.fixture(scope="session")
def make_crew() -> Iterator[Callable[..., Crew]]:
    crews = []

    def make(world_size: int, address: str | None = None) -> Crew:
        crews.append(Crew(world_size, address))
        return crews[-1]

    yield make
    for crew in crews:
        crew.end()


@pytest.fixture
def server() -> Iterator[MeshServer]:
    running = MeshServer("127.0.0.1:0", 2)
    yield running
    running.close(0)
