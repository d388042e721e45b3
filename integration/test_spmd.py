"""Programs that launch nothing: SPMD programs, and those that use several devices of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.pjrt

PROGRAMS = Path(__file__).parent / "programs"
CPU = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}


def run(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)


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
    done = run([*command, str(PROGRAMS / "train_sharded.py")], {**clean_environ, **environ})
    assert done.returncode == 0, done.stderr
    marker, count, loss = done.stdout.split()
    assert (marker, count) == ("RESULT", "4")
    assert float(loss) == pytest.approx(loss_on_cpu(), abs=1e-5)


def test_a_program_that_launches_nothing_has_all_devices(clean_environ: dict[str, str]) -> None:
    done = run([sys.executable, str(PROGRAMS / "use_all_devices.py")], {**clean_environ, **CPU})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "RESULT ['xla:0', 'xla:1', 'xla:2', 'xla:3'] [6, 10, 14, 18] [1, 1]\n"


@pytest.mark.long
def test_an_spmd_program_on_a_tpu_node_is_refused(clean_environ: dict[str, str]) -> None:
    # Before the worker is asked.
    environ = {**clean_environ, "XRT_TPU_CONFIG": "tpu_worker;0;127.0.0.1:1"}
    done = run([sys.executable, str(PROGRAMS / "train_sharded.py")], environ)
    assert done.returncode == 1
    [*_, line] = done.stderr.splitlines()
    assert line.startswith("RuntimeError: SPMD programs (torch_xla.runtime.use_spmd) do not run on these")
    assert line.endswith("run them on an emulated TPU: POLYXLA_EMULATE=v4-8 python SCRIPT")
