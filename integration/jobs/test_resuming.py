"""Training goes on after the loss of its worker, with the bits of a run that lost none."""

from __future__ import annotations

import contextlib
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
LIMIT_S = 900
STEPS, SNAPSHOT_EVERY = 30, 10
RESUMES = {"POLYXLA_XRT_RESUME": "60", "POLYXLA_XRT_SNAPSHOT_EVERY": str(SNAPSHOT_EVERY)}
LOSSES, LONG_STEPS, PAUSE_S = 20, 600, 0.25
"""Of the long tests: losses of a worker in one job, its steps, and the pause after each step."""
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
        try:
            for line in job.stdout:
                what, number, *more = line.split(" ", 2)
                if what == "step":
                    on_step(int(number))
                else:
                    self.found[int(number)] = json.loads(more[0])
            code = job.wait()
        finally:
            limit.cancel()
            limit.join()
            reader.join()
        assert code == 0, "".join(self.err)

    @property
    def resumed(self) -> list[str]:
        return re.findall(r"polyxla: resumed on .*", "".join(self.err))


@pytest.fixture
def train(launch: Callable[..., subprocess.Popen[str]], here: Host) -> Callable[..., Run]:
    def train(
        address: str,
        what: str,
        cores: int,
        on_step: Callable[[int], None] = lambda _: None,
        steps: int = STEPS,
        pause_s: float = 0,
        **environ: str,
    ) -> Run:
        node = {"XRT_TPU_CONFIG": f"tpu_worker;0;{address}", "TPU_NUM_DEVICES": str(cores)}
        command = ["-u", str(PROGRAM), what, str(steps), str(pause_s)]
        return Run(launch(here, *command, **node, **environ), on_step)

    return train


def kill(worker: Served, *, and_supervisor: bool = False) -> None:
    """Kill the serving process, which its supervisor replaces; without effect while there is none."""
    pid = worker.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if and_supervisor:
        worker.process.kill()
        worker.process.wait()
    for child in children:
        # It also ends by itself when its supervisor does.
        with contextlib.suppress(ProcessLookupError):
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


class Losses:
    """Kills the serving process of a worker at random moments, sometimes again while the job resumes."""

    def __init__(self, worker: Served, chance: random.Random) -> None:
        self.count = 0
        self._worker, self._chance = worker, chance
        self._went_on = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        # The first is lost before the first step: while programs are compiled, and the first arrays sent.
        while self.count < LOSSES and not self._is_over.wait(LONG_LIVED_S + self._chance.random()):
            kill(self._worker)
            self.count += 1
            if self._chance.random() < 0.25:
                self._is_over.wait(0.3 + self._chance.random())
                kill(self._worker)
            # A job that is lost five times at one place gives up, and a busy machine takes long for a step.
            self._went_on.clear()
            self._went_on.wait(LIMIT_S)

    def go_on(self, _: int) -> None:
        """Note that the job has done a step."""
        self._went_on.set()

    def end(self) -> None:
        self._is_over.set()
        self._went_on.set()
        self._thread.join()


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cores", [1, 4])
@pytest.mark.parametrize("what", ["digits", "decoder"])
def test_no_moment_of_a_loss_changes_a_bit(
    here: Host, serve: Callable[..., Served], train: Callable[..., Run], what: str, cores: int
) -> None:
    worker = serve(here, cores)
    whole = train(worker.address, what, cores, steps=LONG_STEPS)
    losses = Losses(worker, random.Random(f"{what} {cores}"))
    try:
        killed = train(
            worker.address, what, cores, losses.go_on, steps=LONG_STEPS, pause_s=PAUSE_S, **RESUMES
        )
    finally:
        losses.end()
    assert killed.found == whole.found
    assert losses.count == LOSSES
    # The other losses came while the job still resumed from the one before.
    assert len(killed.resumed) >= LOSSES // 2, killed.err


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_job_moves_from_port_to_port(
    here: Host, serve: Callable[..., Served], train: Callable[..., Run]
) -> None:
    workers = [serve(here, 2), serve(here, 2)]
    addresses = [worker.address for worker in workers]
    whole = train(addresses[0], "decoder", 2, steps=LONG_STEPS)

    def move(step: int) -> None:
        number, since = divmod(step, LONG_STEPS // 5)
        place = number % 2 ^ 1
        # The worker that the job is on ends. The job waits at every fifth step, so the tenth after it is done
        # by the other worker. Started again before that, this one could take the job back.
        if number and since == 0:
            kill(workers[place], and_supervisor=True)
        elif number and since == 10:
            workers[place] = serve(here, 2, int(addresses[place].rpartition(":")[2]))

    moved = train(
        addresses[0],
        "decoder",
        2,
        move,
        steps=LONG_STEPS,
        pause_s=PAUSE_S / 3,
        POLYXLA_XRT_SPARES=addresses[1],
        **RESUMES,
    )
    assert moved.found == whole.found
    assert len(moved.resumed) == 4, moved.err
