"""A job that was killed goes on from what it kept on the worker."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from jobs.conftest import Host, Served

PROGRAM = Path(__file__).parent.parent / "programs" / "train_with_kept_state.py"
STEPS, KILLED_AT = 12, 8


@pytest.mark.parametrize("cores", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_killed_job_goes_on_with_what_it_has_kept(
    here: Host,
    serve: Callable[..., Served],
    launch: Callable[..., subprocess.Popen[str]],
    chosen_worker: tuple[list[str], dict[str, str]],
    cores: int,
) -> None:
    worker = serve(here, cores, platform=[*chosen_worker[0], "--keep", "60"])
    node = {"XRT_TPU_CONFIG": f"tpu_worker;0;{worker.address}", "TPU_NUM_DEVICES": str(cores)}

    def start(name: str, *waits_after: str) -> subprocess.Popen[str]:
        command = [str(PROGRAM), str(STEPS), *waits_after]
        return launch(here, *command, **node, POLYXLA_XRT_JOB=name, POLYXLA_WAIT_S="60")

    whole = lines(start("whole"))
    killed = start("killed", str(KILLED_AT))
    assert killed.stdout is not None
    assert f"step {KILLED_AT}\n" in killed.stdout
    # Replicas notice that their launcher is gone.
    killed.kill()
    found = lines(start("killed"))
    assert found.count("continues at 5") == cores
    assert found.count("step 4") == 0
    assert found.count("step 5") == cores
    weights = [line for line in whole if line.startswith("weights ")]
    assert len(weights) == cores
    assert sorted(line for line in found if line.startswith("weights ")) == sorted(weights)


def lines(job: subprocess.Popen[str]) -> list[str]:
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    return out.splitlines()
