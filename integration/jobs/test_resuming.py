"""Training goes on after the loss of its worker, with the bits of a run that lost none."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from jobs.conftest import Host, Served

PROGRAM = Path(__file__).parent.parent / "programs" / "train_through_losses.py"
LIMIT_S = 200
STEPS, SNAPSHOT_EVERY = 30, 10
RESUMES = {"POLYXLA_XRT_RESUME": "60", "POLYXLA_XRT_SNAPSHOT_EVERY": str(SNAPSHOT_EVERY)}
LOSSES = 20
"""Losses of a worker in the long test, each in a run of its own."""
LONG_LIVED_S = 5.5
"""Age from which the end of a serving process does not count as a failed start of its worker."""


class Run:
    """A run of the program; `on_step` is called with the number of each step that it prints."""

    def __init__(self, job: subprocess.Popen[str], on_step: Callable[[int], None]) -> None:
        self.found: dict[int, Any] = {}
        self.err: list[str] = []
        assert job.stdout is not None
        assert job.stderr is not None
        reader = threading.Thread(target=self.err.extend, args=(job.stderr,))
        reader.start()
        limit = threading.Timer(LIMIT_S, job.kill)
        limit.start()
        for line in job.stdout:
            what, number, *more = line.split(" ", 2)
            if what == "step":
                on_step(int(number))
            else:
                self.found[int(number)] = json.loads(more[0])
        code = job.wait()
        limit.cancel()
        reader.join()
        assert code == 0, "".join(self.err)

    @property
    def resumed(self) -> list[str]:
        return re.findall(r"polyxla: resumed on .*", "".join(self.err))


@pytest.fixture
def train(launch: Callable[..., subprocess.Popen[str]], here: Host) -> Callable[..., Run]:
    def train(
        address: str, what: str, cores: int, on_step: Callable[[int], None] = lambda _: None, **environ: str
    ) -> Run:
        node = {"XRT_TPU_CONFIG": f"tpu_worker;0;{address}", "TPU_NUM_DEVICES": str(cores)}
        return Run(launch(here, "-u", str(PROGRAM), what, str(STEPS), **node, **environ), on_step)

    return train


def kill(worker: Served) -> None:
    """Kill the serving process, which its supervisor replaces; without effect while there is none."""
    pid = worker.process.pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)


def test_a_decoder_trains_through_the_loss_of_its_worker(
    here: Host, serve: Callable[..., Served], train: Callable[..., Run]
) -> None:
    worker = serve(here, 2)
    whole = train(worker.address, "decoder", 2)
    assert (len(whole.found), whole.resumed) == (2, [])

    def kill_in_the_middle(step: int) -> None:
        if step == STEPS // 2:
            kill(worker)

    killed = train(worker.address, "decoder", 2, kill_in_the_middle, **RESUMES)
    assert killed.found == whole.found
    assert len(killed.resumed) == 1, killed.err
    assert f"waiting up to 60 s for {worker.address}" in "".join(killed.err)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cores", [1, 4])
@pytest.mark.parametrize("what", ["digits", "decoder"])
def test_no_moment_of_a_loss_changes_a_bit(
    here: Host, serve: Callable[..., Served], train: Callable[..., Run], what: str, cores: int
) -> None:
    worker = serve(here, cores)
    whole = train(worker.address, what, cores)
    chance = random.Random(f"{what} {cores}")
    for _ in range(LOSSES):
        timer = threading.Timer(LONG_LIVED_S, lambda: None)
        timer.start()
        timer.join()
        at, delay_s = chance.randrange(-3, STEPS), chance.random() / 3

        def kill_soon(step: int, at: int = at, delay_s: float = delay_s) -> None:
            if step == at:
                threading.Timer(delay_s, kill, [worker]).start()

        if at < 0:
            # Before the first step: while the programs are compiled, and the first arrays sent.
            threading.Timer(8 + 4 * at * chance.random() / 3, kill, [worker]).start()
        assert train(worker.address, what, cores, kill_soon, **RESUMES).found == whole.found, (at, delay_s)
