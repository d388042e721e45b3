"""The ways in which replicas start: plain python, torchrun, fork, a notebook's cells."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from polyxla import Replica, UsageError
from polyxla.testing import RuntimeUnderTest

SEEDS = Path(__file__).parent / "seeds"
TIMEOUT_S = 300


def run(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def sums(output: str) -> list[tuple[str, ...]]:
    return sorted(re.findall(r"ordinal (\d+) of (\d+) sum ([\d.]+)", output))


def torchrun(count: int, *command: str) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [f"--nproc-per-node={count}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *command]


def test_plain_python_with_a_count(clean_environ: dict[str, str]) -> None:
    environ = {**clean_environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    done = run([sys.executable, str(SEEDS / "all_reduce.py")], environ)
    assert done.returncode == 0, done.stderr
    assert sums(done.stdout) == [("0", "2", "1.0"), ("1", "2", "1.0")]


@pytest.mark.long
@pytest.mark.parametrize("device", ["CPU", None])
def test_torchruns_processes_are_replicas(clean_environ: dict[str, str], device: str | None) -> None:
    environ = {**clean_environ, **({"PJRT_DEVICE": device} if device else {})}
    done = run(torchrun(2, str(SEEDS / "all_reduce.py")), environ)
    assert done.returncode == 0, done.stderr
    assert sums(done.stdout) == [("0", "2", "1.0"), ("1", "2", "1.0")]


LAUNCH = """
import polyxla

def train(replica):
    return replica.all_gather(replica.ordinal), replica.world.process_count

if __name__ == "__main__":
    # One string: several processes write to one pipe.
    print(f"RESULT {polyxla.launch(train)}\\n", end="", flush=True)
"""


def test_a_launch_under_torchrun_joins(clean_environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "launch.py").write_text(LAUNCH)
    done = run(torchrun(2, str(tmp_path / "launch.py")), {**clean_environ, "PJRT_DEVICE": "CPU"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("RESULT [([0, 1], 2)]") == 2


BEGUN = """
import os
from pathlib import Path

begun = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()

import polyxla

def parent(replica):
    return str(os.getppid())

if __name__ == "__main__":
    print("RESULT", len(begun), begun * 2 == polyxla.launch(parent))
"""


def test_under_polyxla_run_the_replicas_imports_begin_with_the_script(
    clean_environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "begun.py").write_text(BEGUN)
    command = [sys.executable, "-m", "polyxla", "run", "--devices", "2", str(tmp_path / "begun.py")]
    done = run(command, {**clean_environ, "PJRT_DEVICE": "CPU"})
    assert "RESULT 1 True" in done.stdout, done.stderr


def test_a_torchrun_that_does_not_match_is_refused(clean_environ: dict[str, str]) -> None:
    done = run(torchrun(2, str(SEEDS / "all_reduce.py")), {**clean_environ, "POLYXLA_EMULATE": "v5e-4"})
    assert done.returncode != 0
    assert "torchrun has started 2 processes, but 4 replicas here are" in done.stderr
    assert "Write torchrun --nproc-per-node 4." in done.stderr


# What a notebook's kernel does with cells: they run in a __main__ that is no file.
NOTEBOOK = """
import sys, types
main = types.ModuleType("__main__")
sys.modules["__main__"] = main
for cell in CELLS:
    exec(compile(cell, "<cell>", "exec"), main.__dict__)
"""
FIRST_CELL = """
import os, torch, torch_xla, torch_xla.core.xla_model as xm, torch_xla.runtime as xr
SCALE = 10
def train(index, more):
    value = xm.all_reduce("sum", torch.ones((), device=torch_xla.device()) * SCALE * more)
    torch_xla.sync()
    print(f"CELL {xr.global_ordinal()} {value.item():g}\\n", end="", flush=True)
before = dict(os.environ)
torch_xla.launch(train, args=(1,))
"""
SECOND_CELL = """
SCALE = 100
torch_xla.launch(train, args=(1,))
import polyxla
print("LAUNCHED", polyxla.launch(lambda replica: replica.all_reduce(SCALE), devices=2))
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
"""


def test_two_cells_of_a_notebook(clean_environ: dict[str, str], tmp_path: Path) -> None:
    code = f"CELLS = {[FIRST_CELL, SECOND_CELL]!r}\n{NOTEBOOK}"
    environ = {**clean_environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    done = run([sys.executable, "-c", code], environ)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"CELL (\d \d+)", done.stdout)) == ["0 20", "0 200", "1 20", "1 200"]
    assert "LAUNCHED [200, 200]" in done.stdout


def test_forks_share_what_the_parent_made(clean_environ: dict[str, str], tmp_path: Path) -> None:
    # As in torch_xla's documents: a model that is made once, moved by one replica after the other.
    (tmp_path / "wrapper.py").write_text(
        """
import torch, torch_xla, torch_xla.core.xla_model as xm, torch_xla.distributed.xla_multiprocessing as xmp
WRAPPED = xmp.MpModelWrapper(torch.nn.Linear(2, 1, bias=False))
SERIAL = xmp.MpSerialExecutor()
def train(index):
    weight = SERIAL.run(lambda: WRAPPED.to(torch_xla.device())).weight.sum()
    gathered = xm.all_gather(weight[None])
    torch_xla.sync()
    print(f"SAME {bool((gathered == gathered[0]).all())}\\n", end="", flush=True)
if __name__ == "__main__":
    torch_xla.launch(train, start_method="fork")
"""
    )
    environ = {**clean_environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    done = run([sys.executable, str(tmp_path / "wrapper.py")], environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("SAME True") == 2


def _process(replica: Replica) -> tuple[int, int]:
    return os.getpid(), replica.all_reduce(replica.ordinal)


@pytest.mark.parametrize("start_method", [pytest.param("spawn", marks=pytest.mark.long), "forkserver"])
def test_start_methods(runtime: RuntimeUnderTest, start_method: str) -> None:
    answers = runtime.launch(_process, devices=2, start_method=start_method)
    assert len({os.getpid(), *(pid for pid, _ in answers)}) == 3
    assert [total for _, total in answers] == [1, 1]


def test_several_replicas_inline_are_refused(runtime: RuntimeUnderTest) -> None:
    with pytest.raises(UsageError, match="2 replicas cannot run inline"):
        runtime.launch(_process, devices=2, start_method="inline")
