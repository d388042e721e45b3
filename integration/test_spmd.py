"""Programs that launch nothing: SPMD programs, and those that use several devices of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from polyxla.plugin import free_ports

pytestmark = pytest.mark.pjrt

PROGRAMS = Path(__file__).parent / "programs"
CPU = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}


def run(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)


def worker(cores: int) -> dict[str, str]:
    """Return the variables of a TPU node that the program starts on this machine."""
    address = f"localhost:{free_ports(1)[0]}"
    return {"XRT_TPU_CONFIG": f"localservice;0;{address}", "TPU_NUM_DEVICES": str(cores)}


def loss_on_cpu() -> float:
    """Train as ``programs/train_sharded.py`` does, without XLA."""
    torch.manual_seed(0)
    data = torch.randn(8, 3)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def check_training(done: subprocess.CompletedProcess[str], devices: int = 4) -> None:
    assert done.returncode == 0, done.stderr
    marker, count, loss = done.stdout.split()
    assert (marker, count) == ("RESULT", str(devices))
    assert float(loss) == pytest.approx(loss_on_cpu(), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "environ"),
    [
        ([sys.executable], CPU),
        ([sys.executable], {"POLYXLA_EMULATE": "v4-8"}),
        pytest.param([sys.executable, "-m", "polyxla", "run", "--devices", "4"], {}, marks=pytest.mark.long),
    ],
)
def test_an_spmd_program_trains_on_all_devices(
    clean_environ: dict[str, str], command: list[str], environ: dict[str, str]
) -> None:
    check_training(run([*command, str(PROGRAMS / "train_sharded.py")], {**clean_environ, **environ}))


@pytest.mark.slow
def test_an_spmd_program_on_each_host_of_a_pod_trains_on_all_devices(clean_environ: dict[str, str]) -> None:
    first = f"127.78.{os.getpid() % 250}"
    environ = {"POLYXLA_EMULATE": "v4-16", "TPU_WORKER_HOSTNAMES": f"{first}.1,{first}.2"}
    command = [sys.executable, str(PROGRAMS / "train_sharded.py")]
    with ThreadPoolExecutor(2) as hosts:
        environs = [{**clean_environ, **environ, "POLYXLA_EMULATE_HOST": str(host)} for host in range(2)]
        for done in hosts.map(lambda environ: run(command, environ), environs):
            check_training(done, devices=8)
            assert "8 devices, 4 of them on this host, one SPMD program" in done.stderr


@pytest.mark.slow
def test_an_spmd_program_trains_on_all_cores_of_a_worker(clean_environ: dict[str, str]) -> None:
    command = [sys.executable, str(PROGRAMS / "train_sharded.py"), "hybrid"]
    check_training(run(command, {**clean_environ, **worker(4)}))


@pytest.mark.slow
def test_a_program_that_launches_nothing_has_all_devices(clean_environ: dict[str, str]) -> None:
    done = run([sys.executable, str(PROGRAMS / "use_all_devices.py")], {**clean_environ, **CPU})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "RESULT ['xla:0', 'xla:1', 'xla:2', 'xla:3'] [6, 10, 14, 18] [1, 1]\n"


@pytest.mark.slow
def test_an_spmd_program_on_several_workers_is_refused(clean_environ: dict[str, str]) -> None:
    # Refused before a worker is asked: each host would silently train on its own.
    workers = "|".join(f"tpu_worker;{task};127.0.0.1:{task + 1}" for task in range(2))
    environ = {**clean_environ, "XRT_TPU_CONFIG": workers, "XRT_LOCAL_WORKER": "tpu_worker:0"}
    mesh = {"XRT_MESH_SERVICE_ADDRESS": "127.0.0.1:1", "XRT_SHARD_WORLD_SIZE": "2"}
    done = run([sys.executable, str(PROGRAMS / "train_sharded.py")], {**environ, **mesh})
    assert done.returncode == 1
    [*_, line] = done.stderr.splitlines()
    assert line.startswith("RuntimeError: SPMD programs (torch_xla.runtime.use_spmd) do not run here")
    assert "do not run here: this job has 2 workers, and each host drives only its own; run an" in line


@pytest.mark.long
def test_spmd_in_a_replica_of_a_worker_is_refused(clean_environ: dict[str, str]) -> None:
    done = run([sys.executable, str(PROGRAMS / "spmd_in_replica.py")], {**clean_environ, **worker(2)})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(
            "REFUSED SPMD programs (torch_xla.runtime.use_spmd) do not run here: a replica"
        )
        assert line.endswith("has one core; run an SPMD program without launching replicas, by python SCRIPT")


@pytest.mark.slow
@pytest.mark.parametrize("environ", [CPU, worker(4)], ids=["pjrt", "xrt"])
def test_a_tensor_that_is_redistributed_has_its_new_sharding(
    environ: dict[str, str], clean_environ: dict[str, str]
) -> None:
    done = run([sys.executable, str(PROGRAMS / "redistribute.py")], {**clean_environ, **environ})
    assert done.returncode == 0, done.stderr
    rows, columns = "{devices=[4,1]0,1,2,3}", "{devices=[1,4]0,1,2,3}"
    assert done.stdout.split() == [rows, "{replicated}", columns, rows]


@pytest.mark.slow
def test_a_tensor_that_is_being_computed_can_be_divided(clean_environ: dict[str, str]) -> None:
    done = run([sys.executable, str(PROGRAMS / "divide_at_once.py")], {**clean_environ, **CPU})
    assert (done.returncode, done.stdout) == (0, "10\n"), done.stderr


@pytest.mark.parametrize("when", [("before",), ("after",), ("before", "after"), ()], ids=" and ".join)
def test_a_gradient_on_the_cpu_may_come_first(when: tuple[str, ...], clean_environ: dict[str, str]) -> None:
    program = str(PROGRAMS / "differentiate_on_cpu_first.py")
    done = run([sys.executable, program, *when], {**clean_environ, **CPU})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["6.0"] * (len(when) + 5)
