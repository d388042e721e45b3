"""Jobs on the workers of a TPU slice: two emulated hosts of a v4-16, each with a worker and a launcher."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jobs.conftest import Host
from polyxla.plugin import free_addresses, free_ports

if TYPE_CHECKING:
    from jobs.conftest import Served

Launch = Callable[..., subprocess.Popen[str]]
PATIENCE_S = 400
PORT = 8470
LOSS = re.compile(r"epoch (\d+)/\d+, .* loss ([\d.e-]+)")
pytestmark = [pytest.mark.long, pytest.mark.timeout(3 * PATIENCE_S)]


class Slice:
    """Two hosts, whose workers form a slice.

    Attributes:
        hosts: with their addresses.
        workers: their supervisors.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.hosts = [Host(address) for address in free_addresses(2)]
        self.listed = "|".join(f"w;{task};{host.address}:{PORT}" for task, host in enumerate(self.hosts))
        self.workers = [
            launch(
                host,
                *("-m", "polyxla", "worker", "--platform", "tpu", "--slice", self.listed, "--json"),
                *("--address", f"{host.address}:{PORT}"),
                POLYXLA_EMULATE="v4-16",
                POLYXLA_EMULATE_HOST=str(number),
            )
            for number, host in enumerate(self.hosts)
        ]
        for worker in self.workers:
            assert worker.stdout is not None
            printed = "".join(iter(worker.stdout.readline, "}\n")) + "}"
            assert json.loads(printed)["devices"] == 4

    def serving_pid(self, worker: int) -> int:
        """Return the process that serves for one of the workers."""
        pid = self.workers[worker].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    def start(self, *command: str) -> list[subprocess.Popen[str]]:
        """Start a job's launchers; only the first host gets the list of workers."""
        common = {
            "XRT_MESH_SERVICE_ADDRESS": f"{self.hosts[0].address}:{free_ports(1)[0]}",
            "XRT_SHARD_WORLD_SIZE": "2",
            "TPU_NUM_DEVICES": "4",
        }
        config = [{"XRT_TPU_CONFIG": self.listed}, {}]
        run = ("-m", "polyxla", "run", *command)
        return [
            self._launch(host, *run, XRT_LOCAL_WORKER=f"w:{number}", **common, **own)
            for number, (host, own) in enumerate(zip(self.hosts, config, strict=True))
        ]


def results(jobs: list[subprocess.Popen[str]]) -> tuple[list[Any], list[float]]:
    """Return the results that the launchers printed, and the losses of the epochs."""
    printed, losses = [], list[float]()
    for job in jobs:
        out, err = job.communicate(timeout=PATIENCE_S)
        assert job.returncode == 0, err
        printed.append(json.loads(out))
        losses += [float(loss) for _, loss in LOSS.findall(err)]
    return printed, losses


DIGITS = ("-m", "polyxla_examples.digits", "--json")


def test_digits_trains_on_a_slice_as_on_one_worker(
    launch: Launch, serve: Callable[..., Served], here: Host
) -> None:
    printed, losses = results(Slice(launch).start(*DIGITS))
    assert [result["world_size"] for result in printed] == [8, 8]
    assert all(result["test_accuracy"] > 0.97 for result in printed)
    served = serve(here, 8, platform=())
    environ = {"XRT_TPU_CONFIG": f"w;0;{served.address}", "TPU_NUM_DEVICES": "8"}
    (alone,), expected = results([launch(here, "-m", "polyxla", "run", *DIGITS, **environ)])
    assert len(losses) == 15
    # The sums of the gradients are rounded in another order.
    assert losses == pytest.approx(expected, rel=0.02, abs=1e-3)
    assert [result["test_accuracy"] for result in printed] == 2 * [alone["test_accuracy"]]


def test_a_lost_process_ends_the_job_and_the_next_one_passes(launch: Launch) -> None:
    pod = Slice(launch)
    before = [pod.serving_pid(worker) for worker in range(2)]
    jobs = pod.start(*DIGITS)
    assert jobs[0].stderr is not None
    assert any(LOSS.search(line) for line in jobs[0].stderr)
    os.kill(before[1], signal.SIGKILL)
    errors = [job.communicate(timeout=PATIENCE_S)[1] for job in jobs]
    assert all(job.returncode for job in jobs)
    assert f"worker 1 of the slice, at {pod.hosts[1].address}:{PORT}, has ended its process" in errors[0]
    assert f"the worker at {pod.hosts[1].address}:{PORT} is gone" in errors[1]
    printed, _ = results(pod.start(*DIGITS))
    assert all(result["test_accuracy"] > 0.97 for result in printed)
    assert not set(before) & {pod.serving_pid(worker) for worker in range(2)}
