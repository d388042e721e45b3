"""Fixtures: a real Ray cluster whose two nodes emulate hosts of a TPU, and drivers with an environment."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from polyxla.plugin import free_addresses

TIMEOUT_S = 180.0
PROGRAMS = Path(__file__).parent / "programs"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have one process of pytest-xdist run all tests of this directory: each process starts a cluster."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("ray"))


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


@dataclass
class Drivers:
    """Starts drivers with an environment of their own, and ends what is left.

    Attributes:
        directory: of this test.
        environ: of the drivers.
    """

    directory: Path
    environ: dict[str, str]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start Python with these arguments."""
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=self.environ,
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def start_run(self, *arguments: str) -> subprocess.Popen[str]:
        """Start ``polyxla pod run --ray``."""
        how = ["--ray", "--grace", "1", "--connect-timeout", "60", "--env", f"RAY_TEST={self.directory}"]
        return self.start("-m", "polyxla", "pod", "run", *how, "--env", "NUMBER={host}", *arguments)

    @staticmethod
    def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        """Wait for the end of a driver; return its output."""
        out, err = process.communicate(timeout=TIMEOUT_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.finish(self.start_run(*arguments))

    def pids(self, count: int) -> list[int]:
        """Wait until programs have written that many process ids; return them."""
        from polyxla_testing.processes import wait_until

        files = self.directory.glob
        wait_until(lambda: len(list(files("*.pid"))) >= count, f"{count} processes", TIMEOUT_S)
        return [int(path.read_text()) for path in files("*.pid")]


@pytest.fixture
def drivers(cluster: RayCluster, tmp_path: Path) -> Iterator[Drivers]:
    """Drivers that are connected to the cluster by RAY_ADDRESS."""
    variables = {"RAY_ADDRESS": cluster.address, "XDG_STATE_HOME": str(tmp_path / "state")}
    found = Drivers(tmp_path, {**os.environ, **variables})
    try:
        yield found
    finally:
        for process in found.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
