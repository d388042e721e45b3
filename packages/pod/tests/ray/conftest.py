"""Fixtures: a real Ray cluster whose two nodes emulate hosts of a TPU, and drivers with an environment."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from packages.pod.tests.conftest import Commands
from polyxla.plugin import free_addresses

TIMEOUT_S = 180.0
PROGRAMS = Path(__file__).parent / "programs"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have one process of pytest-xdist run all tests of a file here: each process starts a cluster."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


@dataclass
class RayCluster:
    """A running cluster.

    Attributes:
        process: of ``programs/cluster.py``.
        hosts: the addresses of the nodes with chips, by worker id.
        address: of the head.
    """

    process: subprocess.Popen[str]
    hosts: list[str]
    address: str

    def order(self, what: str) -> None:
        """Have a node removed, leave or added, such as ``remove 1``."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    # Ray's sockets are in it, and their paths must be short.
    directory = tempfile.mkdtemp(prefix="ray-")
    hosts = free_addresses(2)
    process = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "cluster.py"), ",".join(hosts)],
        env={**os.environ, "RAY_TMPDIR": directory, "RAY_USAGE_STATS_ENABLED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # Ctrl-C in a test reaches no other process.
        start_new_session=True,
    )
    try:
        assert process.stdout
        yield RayCluster(process, hosts, process.stdout.readline().strip())
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=TIMEOUT_S)
        process.kill()
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


class Drivers(Commands):
    """Starts drivers."""

    timeout_s = TIMEOUT_S

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start Python with these arguments."""
        return self.start_command(sys.executable, *arguments, directory=self.directory)

    def start_run(self, *arguments: str) -> subprocess.Popen[str]:
        """Start ``polyxla pod run --ray``."""
        how = ["--ray", "--grace", "1", "--connect-timeout", "60", "--env", f"RAY_TEST={self.directory}"]
        return self.start("-m", "polyxla", "pod", "run", *how, "--env", "NUMBER={host}", *arguments)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.finish(self.start_run(*arguments))


@pytest.fixture
def drivers(cluster: RayCluster, tmp_path: Path) -> Iterator[Drivers]:
    """Drivers that are connected to the cluster by RAY_ADDRESS."""
    variables = {"RAY_ADDRESS": cluster.address, "XDG_STATE_HOME": str(tmp_path / "state")}
    with Drivers(tmp_path, {**os.environ, **variables}) as found:
        yield found
