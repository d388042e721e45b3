"""Every way to start processes on emulated TPUs whose devices TorchTPU numbers in another order than XLA."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
POLYXLA_RUN = ("-m", "polyxla", "run")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(clean_environ: dict[str, str]) -> Run:
    """Runs Python with arguments on an emulated TPU, with more variables if they are given."""

    def run_on(tpu: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env={**clean_environ, "POLYXLA_EMULATE": tpu, **variables},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )

    return run_on


def check_sums(done: subprocess.CompletedProcess[str], count: int) -> None:
    """Check that each of `count` processes has printed its number and the sum of all."""
    assert done.returncode == 0, done.stderr[-3000:]
    total = float(sum(range(count)))
    assert sorted(done.stdout.splitlines()) == [f"{number} of {count}: {total}" for number in range(count)]


@pytest.mark.parametrize(
    ("tpu", "count"), [("v4-8", 4), ("tpu7x-8", 8), pytest.param("v4-16", 8, marks=pytest.mark.long)]
)
def test_polyxla_run_starts_a_process_for_each_device(run: Run, tpu: str, count: int) -> None:
    check_sums(run(tpu, *POLYXLA_RUN, str(PROGRAMS / "replica_sum.py")), count)


@pytest.mark.parametrize(
    ("devices", "count"), [("[2, 3]", 2), pytest.param("[2]", 1, marks=pytest.mark.long)]
)
def test_a_part_of_a_host_runs(run: Run, devices: str, count: int) -> None:
    program = str(PROGRAMS / "replica_sum.py")
    check_sums(run("v4-8", *POLYXLA_RUN, "--devices", devices, program), count)


@pytest.mark.parametrize(
    ("tpu", "count"), [("tpu7x-2", 2), pytest.param("tpu7x-8", 4, marks=pytest.mark.long)]
)
def test_torchrun_starts_a_process_for_each_device_of_a_chip(run: Run, tpu: str, count: int) -> None:
    check_sums(run(tpu, *TORCHRUN, str(count), str(PROGRAMS / "rank_sum.py")), count)


def test_a_program_runs_once_in_each_replica(run: Run) -> None:
    done = run("v4-8", *POLYXLA_RUN, "--each", str(PROGRAMS / "rank_and_launches.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [f"{rank} of 4: mean 1.5, launch [[0, 1, 2, 3]]" for rank in range(4)]
    assert sorted(done.stdout.splitlines()) == lines


def test_a_replica_that_ends_slowly_is_not_aborted(run: Run) -> None:
    done = run("v5e-1", *POLYXLA_RUN, "--each", str(PROGRAMS / "slow_end.py"))
    assert done.returncode
    assert "called sys.exit(3)" in done.stderr
    # TorchTPU ends a process that asks it for its counts after its own end.
    assert "Check failed" not in done.stderr, done.stderr[-3000:]


def test_the_replica_of_run_each_that_fails_is_named(run: Run) -> None:
    program = str(PROGRAMS / "rank_and_launches.py")
    done = run("v5e-4", *POLYXLA_RUN, "--each", "--devices", "[0, 1]", program, "fail")
    assert done.returncode == 3, done.stderr[-3000:]
    assert "the replica with ordinal 1 called sys.exit(3) at " in done.stderr


def test_replicas_do_not_meet_in_a_file_that_an_earlier_job_has_left(run: Run) -> None:
    done = run("v4-8", str(PROGRAMS / "left_meeting.py"), TORCH_TPU_DEVICES_PER_HOST="4")
    assert done.returncode == 0, done.stderr[-3000:]
    # The replicas of both launches have the same parent, so TorchTPU would have read the file.
    assert done.stdout.splitlines() == [f"1 True {[[0, 1, 2, 3]] * 4}"]
    assert "Node-local store" not in done.stderr
    assert "TORCH_TPU_DEVICES_PER_HOST" not in done.stderr


def test_a_program_that_a_replica_starts_imports_torch(run: Run) -> None:
    done = run("v5e-4", str(PROGRAMS / "start_in_replica.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    # TorchTPU has written variables of its own, which the program inherits.
    assert done.stdout.splitlines() == [str([(0, "2.0 2,2,1")] * 4)]
