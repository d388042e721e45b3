"""Hosts, their workers, and jobs on these workers: real processes, some in network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest


class Host:
    """A host that runs workers and launchers.

    Attributes:
        address: IP address.
        prefix: command that runs another command on the host.
    """

    def __init__(self, address: str, *prefix: str) -> None:
        self.address = address
        self.prefix = prefix

    def start(self, *command: str, **environ: str) -> subprocess.Popen[str]:
        """Start a Python program; `environ` alone chooses the runtime."""
        chooses = ("XRT_", "PJRT_", "TPU_", "POLYXLA_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(chooses)}
        return subprocess.Popen(
            [*self.prefix, sys.executable, *command],
            env=clean | {"POLYXLA_COMPILE_CACHE": "off"} | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )


@dataclass
class Served:
    """A running worker.

    Attributes:
        host: the host that it runs on.
        address: ``host:port``.
        process: its supervisor.
    """

    host: Host
    address: str
    process: subprocess.Popen[str]

    def status(self) -> dict[str, Any]:
        """Return its status, as the command prints it."""
        asked = self.host.start("-m", "polyxla", "worker", "status", self.address, "--json")
        out, err = asked.communicate(timeout=60)
        assert asked.returncode == 0, err
        status: dict[str, Any] = json.loads(out)
        return status


@pytest.fixture
def serve(chosen_worker: tuple[list[str], dict[str, str]]) -> Iterator[Callable[..., Served]]:
    """Start workers that end with the test."""
    chosen, variables = chosen_worker
    with ExitStack() as stack:

        def start(
            host: Host, devices: int, port: int = 0, platform: Sequence[str] = chosen, **environ: str
        ) -> Served:
            options = [
                "--address",
                f"{host.address}:{port}",
                "--devices",
                str(devices),
                "--insecure",
                "--json",
                *platform,
            ]
            of_platform = variables if platform is chosen else {}
            process = host.start("-m", "polyxla", "worker", *options, **of_platform, **environ)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            assert process.stdout is not None
            printed = "".join(iter(process.stdout.readline, "}\n")) + "}"
            return Served(host, json.loads(printed)["address"], process)

        yield start


@pytest.fixture
def launch() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start jobs whose processes end with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(host: Host, *command: str, **environ: str) -> subprocess.Popen[str]:
        started.append(host.start(*command, **environ))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def here() -> Host:
    """This machine."""
    return Host("127.0.0.1")


@pytest.fixture
def namespaces() -> Iterator[list[Host]]:
    """Two network namespaces, connected by an interface that is called ``cable`` in both."""
    with cabled() as (hosts, problem):
        if problem:
            pytest.skip(f"no network namespaces here: {problem}")
        yield hosts


@pytest.fixture
def two_hosts() -> Iterator[list[Host]]:
    """Two namespaces; if none can be made, two addresses of the loopback interface."""
    with cabled() as (hosts, problem):
        yield [Host("127.0.0.1"), Host("127.0.0.2")] if problem else hosts


@contextmanager
def cabled() -> Iterator[tuple[list[Host], str]]:
    """Make the namespaces; yield the hosts, and the error if one could not be made."""
    names = [f"polyxla-{os.getpid()}-{number}" for number in range(2)]
    ends = [f"px{os.getpid() % 10**6}{letter}" for letter in "ab"]
    commands = [["ip", "netns", "add", name] for name in names]
    commands += [["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]]]
    hosts = []
    for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
        inside = ["ip", "-n", name]
        commands += [["ip", "link", "set", end, "netns", name, "name", "cable"]]
        commands += [[*inside, "addr", "add", f"10.211.55.{number}/24", "dev", "cable"]]
        commands += [[*inside, "link", "set", link, "up"] for link in ("cable", "lo")]
        hosts.append(Host(f"10.211.55.{number}", "ip", "netns", "exec", name))
    try:
        made = [subprocess.run(command, capture_output=True, text=True, check=False) for command in commands]
        yield hosts, next((done.stderr.strip() for done in made if done.returncode), "")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
