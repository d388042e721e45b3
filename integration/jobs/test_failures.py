"""What becomes of a job whose worker, whose replica or whose network fails: no hang, one clear error."""

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
from polyxla_xrt.assignment import Assignment
from polyxla_xrt.protocol.worker import SILENCE_S

if TYPE_CHECKING:
    from jobs.conftest import Host, Served

PATIENCE_S = 120
ENDS_S = 20
"""How soon everything has to have ended after something has failed, in seconds."""

TRAIN = """
import os, pathlib, sys, torch, torch_xla, torch_xla.core.xla_model as xm, torch_xla.runtime as xr

def train(index, folder, steps):
    device, ordinal = torch_xla.device(), xr.global_ordinal()
    weight = torch.zeros(4, device=device)
    for step in range(steps):
        weight += xm.all_reduce("sum", torch.ones(4, device=device))
        torch_xla.sync()
        if ordinal == 0:
            torch.save({"step": step, "weight": weight.cpu()}, f"{folder}/new")
            os.replace(f"{folder}/new", f"{folder}/checkpoint")
        pathlib.Path(folder, f"ordinal-{ordinal}").write_text(f"{step} {os.getpid()}")

if __name__ == "__main__":
    torch_xla.launch(train, args=(sys.argv[1], int(sys.argv[2])))
    print("DONE")
"""


class Training:
    """A job that trains until it has done its steps, or for very long."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.folder = folder

    def pid(self, ordinal: int) -> int:
        """Return the process of a replica that trains."""
        return int(self._told(ordinal)[1])

    def step(self) -> int:
        """Return how far the first replica has come."""
        return int(self._told(0)[0])

    def _told(self, ordinal: int) -> list[str]:
        file = self.folder / f"ordinal-{ordinal}"
        deadline = time.monotonic() + PATIENCE_S
        # It may be read while it is written.
        while not file.exists() or len(told := file.read_text().split()) != 2:
            assert time.monotonic() < deadline, "the job does not begin"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        return told

    def end(self, timeout_s: float = ENDS_S) -> str:
        """Wait for its end, which is a failure, and return what it said."""
        _, err = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode not in (0, None)
        return err


@pytest.fixture
def train(launch: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> Callable[..., Training]:
    (tmp_path / "train.py").write_text(TRAIN)

    def start(host: Host, address: str, devices: int, steps: int = 10**6) -> Training:
        environ = {"XRT_TPU_CONFIG": f"tpu_worker;0;{address}", "TPU_NUM_DEVICES": str(devices)}
        folder = tmp_path / f"{time.monotonic_ns()}"
        folder.mkdir()
        command = ["-m", "polyxla", "run", str(tmp_path / "train.py"), str(folder), str(steps)]
        return Training(launch(host, *command, **environ), folder)

    return start


def check_served(worker: Served) -> None:
    """See that the worker serves a new job: an array goes there and comes back."""
    with closing(Lease(worker.address, 1, {}, wait_s=ENDS_S)) as lease:
        engine = RemoteEngine(Assignment(worker.address, lease.job, (0,), "TPU", 0, 1, 0, 1), {})
        array = engine.from_host(engine.devices[0], ArrayType("uint8", (3,)), memoryview(b"abc"))
        assert bytes(engine.to_host(array).result(PATIENCE_S)) == b"abc"
        engine.close()


def test_a_killed_worker_ends_its_clients_and_serves_again(
    here: Host, serve: Callable[..., Served], train: Callable[..., Training]
) -> None:
    worker = serve(here, 2)
    job = train(here, worker.address, 2)
    pids = [job.pid(ordinal) for ordinal in range(2)]
    worker.process.kill()
    said = job.end()
    errors = [line for line in said.splitlines() if line.startswith("polyxla: error:")]
    assert len(errors) == 1, said
    assert f"the worker at {worker.address} is gone" in errors[0]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    import torch

    checkpoint = torch.load(job.folder / "checkpoint", weights_only=True)
    assert checkpoint["weight"].tolist() == [2.0 * (checkpoint["step"] + 1)] * 4
    again = serve(here, 2, int(worker.address.rpartition(":")[2]))
    assert again.address == worker.address
    check_served(again)


def test_a_killed_replica_ends_the_others_and_leaves_nothing(
    here: Host, serve: Callable[..., Served], train: Callable[..., Training]
) -> None:
    worker = serve(here, 3)
    job = train(here, worker.address, 3)
    pids = [job.pid(ordinal) for ordinal in range(3)]
    os.kill(pids[1], signal.SIGKILL)
    said = job.end()
    assert re.search(r"process 1 \(pid \d+\) was ended by SIGKILL", said), said
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    deadline = time.monotonic() + ENDS_S
    while (status := worker.status())["job"]:
        assert time.monotonic() < deadline, status
    assert (status["sessions"], status["memory_bytes"]) == (0, 0)
    assert worker.process.poll() is None
    check_served(worker)


def test_a_plain_script_ends_with_its_worker(
    here: Host,
    serve: Callable[..., Served],
    launch: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
) -> None:
    worker = serve(here, 1)
    script = tmp_path / "wait.py"
    script.write_text(
        "import time, torch_xla\ntorch_xla.device()\nprint('READY', flush=True)\ntime.sleep(1000)\n"
    )
    environ = {"XRT_TPU_CONFIG": f"tpu_worker;0;{worker.address}", "TPU_NUM_DEVICES": "1"}
    process = launch(here, str(script), **environ)
    assert process.stdout is not None
    assert process.stdout.readline() == "READY\n"
    worker.process.kill()
    _, err = process.communicate(timeout=ENDS_S)
    assert process.returncode not in (0, None)
    assert f"the worker at {worker.address} is gone" in err


class Cable:
    """What connects a host in a namespace with the others."""

    def __init__(self, host: Host) -> None:
        self._tc = [*host.prefix, "tc", "qdisc"]

    def cut(self) -> None:
        """Drop every packet that the host sends: none fits into so small a bucket."""
        bucket = ["tbf", "rate", "8bit", "burst", "1", "latency", "1ms"]
        subprocess.run([*self._tc, "add", "dev", "cable", "root", *bucket], check=True, capture_output=True)

    def mend(self) -> None:
        subprocess.run([*self._tc, "del", "dev", "cable", "root"], check=True, capture_output=True)


def test_a_short_cut_is_survived_and_a_longer_one_is_told(
    namespaces: list[Host], serve: Callable[..., Served], train: Callable[..., Training]
) -> None:
    worker = serve(namespaces[0], 2)
    job = train(namespaces[1], worker.address, 2)
    job.pid(1)
    cable = Cable(namespaces[1])
    cable.cut()
    time.sleep(5)
    step = job.step()
    cable.mend()
    deadline = time.monotonic() + ENDS_S
    while job.step() < step + 20:
        assert time.monotonic() < deadline, "it does not go on"
        time.sleep(0.1)
    cable.cut()
    said = job.end(2 * SILENCE_S)
    assert f"the worker at {worker.address} is gone" in said
    # The other side has noticed, too, and has let go of everything.
    deadline = time.monotonic() + 2 * SILENCE_S
    while (status := worker.status())["job"]:
        assert time.monotonic() < deadline, status
    assert status["memory_bytes"] == 0
