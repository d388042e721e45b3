"""Emulated TPUs send to each other: every call of torch.distributed, pipelines, and what goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
RANKS = 4


def _launched(environ: dict[str, str], program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    return subprocess.run(
        [*command, str(PROGRAMS / program), *arguments],
        env={"POLYXLA_EMULATE": "v5e-4", **environ},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_ranks_send_in_every_way_and_pipelines_train_as_one_process(clean_environ: dict[str, str]) -> None:
    done = _launched(clean_environ, "pipelines.py")
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    losses = json.loads(line)
    whole = losses.pop("whole")
    assert whole[-1] < whole[0]
    assert set(losses) == {"ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"}
    for schedule, found in losses.items():
        assert found == pytest.approx(whole, rel=1e-5), schedule


@pytest.mark.long
@pytest.mark.parametrize("side", ["send", "recv"])
def test_a_wait_for_a_rank_that_has_ended_is_an_error(clean_environ: dict[str, str], side: str) -> None:
    start = time.monotonic()
    done = _launched({**clean_environ, "POLYXLA_STALL_TIMEOUT_S": "10"}, "ended_peer.py", side)
    assert done.returncode != 0
    assert f"in {side} with the " in done.stderr, done.stderr[-3000:]
    # The line of the program that waits.
    assert "ended_peer.py" in done.stderr
    assert time.monotonic() - start < 200
