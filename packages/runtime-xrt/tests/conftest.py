"""Real processes and sockets: participants of a mesh, workers, and clients of workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from polyxla.plugin import snapshot
from polyxla_xrt.client.channel import ask
from polyxla_xrt.server.mesh.server import MeshServer

SECRET = "of one job"

# Tests count compilations, so they must not use the programs in the user's cache.
os.environ["POLYXLA_COMPILE_CACHE"] = "off"

PARTICIPANT = Path(__file__).parent / "programs" / "mesh_participant.py"
CLIENT = Path(__file__).parent / "programs" / "worker_client.py"
IMPATIENT = Path(__file__).parent / "programs" / "impatient.py"
PATIENCE_S = 20.0
"""Longest wait for something that a process does soon, in seconds."""


class Crew:
    """The participants of a mesh, a process each; without an address, ordinal 0 serves it."""

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
    running = MeshServer("127.0.0.1:0", 2, SECRET)
    yield running
    running.close(0)


class Worker:
    """A `polyxla worker` of two cores: a supervisor, and the serving process, which may be replaced.

    Args:
        log: gets its log.
        options: of the command.
        is_open: whether it admits clients without a token, unless the options say otherwise.
        impatience: seconds between pings, and of silence after which it gives up a client; None for its own.
        environ: variables in addition to this process's.
    """

    def __init__(
        self,
        log: Path,
        *options: str,
        is_open: bool = True,
        impatience: tuple[int, int] | None = None,
        **environ: str,
    ) -> None:
        self._log = log
        if is_open and not {"--token-file", "--tls-cert", "--insecure"} & {*options}:
            # Tests also call the worker through bare gRPC channels, which send no token.
            options = (*options, "--insecure")
        start = [str(IMPATIENT), *map(str, impatience), "polyxla"] if impatience else ["-m", "polyxla"]
        command = [sys.executable, *start, "worker", "--devices", "2", "--json"]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, "--address", "127.0.0.1:0", *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | environ,
            )

    @cached_property
    def address(self) -> str:
        """Its address, which it prints when it serves."""
        assert self.process.stdout is not None
        document = "".join(iter(self.process.stdout.readline, "}\n"))
        assert document, self.log
        address: str = json.loads(document + "}")["address"]
        return address

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def serving_pid(self) -> int:
        pid = self.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

    @property
    def resident_bytes(self) -> int:
        """Memory of the serving process."""
        pages = Path(f"/proc/{self.serving_pid}/statm").read_text().split()[1]
        return int(pages) * 4096

    def status(self, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
        return ask(self.address, "Status", snapshot() if environ is None else environ)

    @property
    def resources(self) -> tuple[int, int]:
        """Numbers of threads and of open files of the serving process."""
        process = Path(f"/proc/{self.serving_pid}")
        return len([*(process / "task").iterdir()]), len([*(process / "fd").iterdir()])

    def wait_until(
        self, holds: Callable[[dict[str, Any]], bool], timeout_s: float = PATIENCE_S
    ) -> dict[str, Any]:
        """Poll the status until `holds` accepts it, and return it."""
        deadline = time.monotonic() + timeout_s
        while not holds(status := self.status()):
            assert time.monotonic() < deadline, (status, self.log)
            time.sleep(0.05)
        return status

    def wait_until_free(self) -> dict[str, Any]:
        return self.wait_until(lambda status: not status["jobs"])

    def wait_until_replaced(self, pid: int) -> None:
        """Wait until the serving process with this pid has been replaced."""
        deadline = time.monotonic() + PATIENCE_S
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)
        self.status()

    def end(self) -> None:
        """End it with SIGTERM, as a user does; the serving process always ends with its supervisor."""
        self.process.terminate()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.communicate()


def _starting(directory: Path) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start(*options: str, waits: bool = True, **more: Any) -> Worker:
        log = directory / f"worker-{len(workers)}.log"
        workers.append(worker := Worker(log, *options, **more))
        assert not waits or worker.address
        return worker

    yield start
    for worker in workers:
        worker.end()


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Return a function that starts a worker for one test, with options."""
    yield from _starting(tmp_path)


@pytest.fixture(scope="module")
def share_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Worker]]:
    """Return a function that starts a worker for all tests of a module, with options."""
    yield from _starting(tmp_path_factory.mktemp("workers"))


@pytest.fixture(scope="module")
def worker(share_worker: Callable[..., Worker]) -> Worker:
    """A worker that the tests of a module share; each leaves it without a job."""
    return share_worker()


class Client:
    """A process with a lease or a session; it answers lines of JSON with lines of JSON."""

    def __init__(self, *arguments: str) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, str(CLIENT), *arguments]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the client has ended"
        return json.loads(line)

    def order(self, what: str) -> Any:
        """Send an order, and return the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        return self.read()

    def kill(self) -> None:
        """Kill it without a goodbye."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def client() -> Iterator[Callable[..., Client]]:
    """Return a function that starts a client: ``lease ADDRESS WAIT_S``, ``session ADDRESS JOB ORDINAL``."""
    clients: list[Client] = []

    def start(*arguments: str) -> Client:
        clients.append(Client(*arguments))
        return clients[-1]

    yield start
    for client in clients:
        client.kill()
