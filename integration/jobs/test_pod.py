"""Which cores a job has: all of its worker, or of several workers, each driven by its own host."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polyxla.plugin import free_ports

if TYPE_CHECKING:
    from jobs.conftest import Host, Served

PATIENCE_S = 180
PROGRAMS = Path(__file__).parents[1] / "programs"
RunOnPod = Callable[[str], list[list[str]]]


@pytest.fixture
def run_on_pod(
    two_hosts: list[Host],
    serve: Callable[..., Served],
    launch: Callable[..., subprocess.Popen[str]],
) -> RunOnPod:
    """Run a program on two hosts with two cores each, and return the lines that each host printed."""

    def run_on_pod(program: str) -> list[list[str]]:
        workers = [serve(host, 2) for host in two_hosts]
        common = {
            "XRT_MESH_SERVICE_ADDRESS": f"{two_hosts[0].address}:{free_ports(1)[0]}",
            "XRT_SHARD_WORLD_SIZE": "2",
            "TPU_NUM_DEVICES": "2",
        }
        config = "|".join(f"c_tpu_worker;{task};{worker.address}" for task, worker in enumerate(workers))
        run = ("-m", "polyxla", "run", str(PROGRAMS / program))
        # As on a pod: only the first host gets the list of workers. It starts last, and the second waits.
        second = launch(two_hosts[1], *run, XRT_LOCAL_WORKER="c_tpu_worker:1", **common)
        first = launch(two_hosts[0], *run, XRT_LOCAL_WORKER="c_tpu_worker:0", XRT_TPU_CONFIG=config, **common)
        lines = []
        for launcher in (first, second):
            out, err = launcher.communicate(timeout=PATIENCE_S)
            assert launcher.returncode == 0, err
            lines.append([line for line in out.splitlines() if line])
        return lines

    return run_on_pod


def test_two_hosts_are_one_job(run_on_pod: RunOnPod) -> None:
    first, second = run_on_pod("print_ordinals.py")
    assert sorted(first + second) == [f"ORDINAL {ordinal} {ordinal} 4 6 0123" for ordinal in range(4)]


def test_every_host_has_the_trained_parameters(run_on_pod: RunOnPod) -> None:
    assert run_on_pod("train_on_pod.py") == [["WEIGHT 2.99"], ["WEIGHT 2.99"]]


def test_a_program_that_launches_nothing_drives_all_cores(
    here: Host, serve: Callable[..., Served], launch: Callable[..., subprocess.Popen[str]]
) -> None:
    worker = serve(here, 4)
    environ = {"XRT_TPU_CONFIG": f"tpu_worker;0;{worker.address}", "TPU_NUM_DEVICES": "4"}
    process = launch(here, str(PROGRAMS / "use_all_devices.py"), **environ)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert out == "RESULT ['xla:0', 'xla:1', 'xla:2', 'xla:3'] [6, 10, 14, 18] [1, 1]\n"
