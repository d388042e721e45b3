"""A job whose worker, replica or network fails ends soon, with one clear error."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polyxla_bridge.programs.executable import ArrayType
from polyxla_xrt.client.engine import RemoteEngine
from polyxla_xrt.client.lease import Lease
from polyxla_xrt.config.assignment import Assignment
from polyxla_xrt.protocol.worker import SILENCE_S

if TYPE_CHECKING:
    from jobs.conftest import Host, Served

PATIENCE_S = 120
ENDS_S = 20
"""Time limit for everything to end after a failure, in seconds."""
PROGRAMS = Path(__file__).parents[1] / "programs"


class Training:
    """A job that trains for a number of steps."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self.process = process
        self.directory = directory

    def pid(self, ordinal: int) -> int:
        """Return the process id of a replica."""
        return int(self._progress(ordinal)[1])

    def step(self) -> int:
        """Return the step of the first replica."""
        return int(self._progress(0)[0])

    def _progress(self, ordinal: int) -> list[str]:
        file = self.directory / f"ordinal-{ordinal}"
        deadline = time.monotonic() + PATIENCE_S
        # The file may be read while it is written.
        while not file.exists() or len(progress := file.read_text().split()) != 2:
            assert time.monotonic() < deadline, "the job does not start"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        return progress

    def end(self, timeout_s: float = ENDS_S) -> str:
        """Wait until the job fails, and return what it printed to stderr."""
        _, err = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode not in (0, None)
        return err


@pytest.fixture
def train(launch: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> Callable[..., Training]:
    def start(host: Host, address: str, devices: int, steps: int = 10**6) -> Training:
        environ = {"XRT_TPU_CONFIG": f"tpu_worker;0;{address}", "TPU_NUM_DEVICES": str(devices)}
        directory = tmp_path / f"{time.monotonic_ns()}"
        directory.mkdir()
        command = ["-m", "polyxla", "run", str(PROGRAMS / "all_reduce_loop.py"), str(directory), str(steps)]
        return Training(launch(host, *command, **environ), directory)

    return start


def check_served(worker: Served) -> None:
    """Check that the worker serves a new job: upload an array and read it back."""
    with closing(Lease(worker.address, 1, {}, wait_s=ENDS_S)) as lease:
        engine = RemoteEngine(Assignment(worker.address, lease.job, (0,), "TPU", 0, 1, 0, 1), {})
        array = engine.from_host(engine.devices[0], ArrayType("uint8", (3,)), memoryview(b"abc"))
        assert bytes(engine.to_host(array).result(PATIENCE_S)) == b"abc"
        engine.close()


def test_a_killed_worker_ends_its_clients_and_can_restart(
    here: Host, serve: Callable[..., Served], train: Callable[..., Training]
) -> None:
    worker = serve(here, 2)
    job = train(here, worker.address, 2)
    pids = [job.pid(ordinal) for ordinal in range(2)]
    worker.process.kill()
    stderr = job.end()
    errors = [line for line in stderr.splitlines() if line.startswith("polyxla: error:")]
    assert len(errors) == 1, stderr
    assert f"the worker at {worker.address} is gone" in errors[0]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    import torch

    checkpoint = torch.load(job.directory / "checkpoint", weights_only=True)
    assert checkpoint["weight"].tolist() == [2 * (checkpoint["step"] + 1.0)] * 4
    again = serve(here, 2, int(worker.address.rpartition(":")[2]))
    assert again.address == worker.address
    check_served(again)


def test_a_stopped_worker_is_the_reason_in_its_clients_error_and_in_its_log(
    here: Host, serve: Callable[..., Served], train: Callable[..., Training]
) -> None:
    worker = serve(here, 2)
    job = train(here, worker.address, 2)
    for ordinal in range(2):
        job.pid(ordinal)
    worker.process.terminate()
    stderr = job.end()
    (error,) = [line for line in stderr.splitlines() if line.startswith("polyxla: error:")]
    assert f"the worker at {worker.address} was stopped" in error
    _, log = worker.process.communicate(timeout=ENDS_S)
    assert "was stopped" in log
    assert "died" not in log


def test_a_killed_replica_ends_the_others_and_the_workers_session(
    here: Host, serve: Callable[..., Served], train: Callable[..., Training]
) -> None:
    worker = serve(here, 3)
    job = train(here, worker.address, 3)
    pids = [job.pid(ordinal) for ordinal in range(3)]
    os.kill(pids[1], signal.SIGKILL)
    stderr = job.end()
    assert re.search(r"process 1 \(replica 1; pid \d+\) was ended by SIGKILL", stderr), stderr
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    deadline = time.monotonic() + ENDS_S
    while (status := worker.status())["jobs"]:
        assert time.monotonic() < deadline, status
    assert worker.process.poll() is None
    check_served(worker)


def test_a_plain_script_ends_with_its_worker(
    here: Host,
    serve: Callable[..., Served],
    launch: Callable[..., subprocess.Popen[str]],
) -> None:
    worker = serve(here, 1)
    environ = {"XRT_TPU_CONFIG": f"tpu_worker;0;{worker.address}", "TPU_NUM_DEVICES": "1"}
    process = launch(here, str(PROGRAMS / "sleep_on_device.py"), **environ)
    assert process.stdout is not None
    assert process.stdout.readline() == "READY\n"
    worker.process.kill()
    _, err = process.communicate(timeout=ENDS_S)
    assert process.returncode not in (0, None)
    assert f"the worker at {worker.address} is gone" in err


class Cable:
    """The network connection of a host in a namespace."""

    def __init__(self, host: Host) -> None:
        self._tc = [*host.prefix, "tc", "qdisc"]

    def cut(self) -> None:
        """Drop every packet that the host sends: the token bucket is smaller than any packet."""
        bucket = ["tbf", "rate", "8bit", "burst", "1", "latency", "1ms"]
        subprocess.run([*self._tc, "add", "dev", "cable", "root", *bucket], check=True, capture_output=True)

    def mend(self) -> None:
        subprocess.run([*self._tc, "del", "dev", "cable", "root"], check=True, capture_output=True)


def test_a_job_survives_a_short_network_failure_and_reports_a_long_one(
    namespaces: list[Host],
    serve: Callable[..., Served],
    train: Callable[..., Training],
) -> None:
    worker = serve(namespaces[0], 2)
    job = train(namespaces[1], worker.address, 2)
    for ordinal in range(2):
        job.pid(ordinal)
    cable = Cable(namespaces[1])
    cable.cut()
    time.sleep(5)
    step = job.step()
    cable.mend()
    deadline = time.monotonic() + ENDS_S
    while job.step() < step + 20:
        assert time.monotonic() < deadline, "the job does not continue"
        time.sleep(0.1)
    cable.cut()
    stderr = job.end(2 * SILENCE_S)
    assert f"the worker at {worker.address} is gone" in stderr
    # The worker has noticed too, and has released everything.
    deadline = time.monotonic() + 2 * SILENCE_S
    while (status := worker.status())["jobs"]:
        assert time.monotonic() < deadline, status
