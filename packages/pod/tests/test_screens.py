"""The live table, and the numbers that it finds in lines."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from polyxla_pod.folding import FoldedLine
from polyxla_pod.pipeline import HostProgress, HostState
from polyxla_pod.screens import LiveScreen, chosen_rows, host_table
from polyxla_testing.processes import wait_for_end_of

if TYPE_CHECKING:
    from conftest import Pod


@pytest.mark.parametrize(
    ("text", "step", "loss", "rate"),
    [
        ("polyxla: epoch 1/3, step 12, 3.4 s: loss 0.25  accuracy 0.9", 12, "0.25", None),
        ("step 5 loss=1e-3 12.5 it/s", 5, "1e-3", 12.5),
        ("Step: 7 | Loss: nan | 2 steps/s", 7, "nan", 2.0),
        ("no numbers here", None, None, None),
        ("12 steps a second", None, None, None),
    ],
)
def test_progress_is_read_from_a_line(
    text: str, step: int | None, loss: str | None, rate: float | None
) -> None:
    progress = HostProgress()
    progress.read(text, 1.0)
    assert (progress.step, progress.loss, progress.steps_per_s) == (step, loss, rate)
    assert progress.last_line == text


def test_the_rate_follows_from_two_lines() -> None:
    progress = HostProgress()
    progress.read("step 10", 1.0)
    progress.read("step 30", 5.0)
    assert progress.steps_per_s == 5.0


def test_the_table_has_a_row_for_each_host() -> None:
    states = [HostState("a", "running"), HostState("b", "connecting")]
    states[0].progress.read("step 3, loss 0.5", 0.0)
    console = Console(file=io.StringIO(), width=100)
    console.print(host_table(states, 10))
    file = console.file
    assert isinstance(file, io.StringIO)
    _, first, second = file.getvalue().splitlines()
    assert first.split()[:5] == ["w0", "a", "running", "3", "0.5"]
    assert second.split() == ["w1", "b", "connecting"]


def test_hosts_that_do_not_run_or_are_behind_come_first() -> None:
    states = [HostState(str(number), "running", HostProgress(step=100 - number)) for number in range(100)]
    states[7].state = "failed"
    shown, rest = chosen_rows(states, 4)
    assert shown == [7, 98, 99]
    assert len(rest) == 97
    console = Console(file=io.StringIO(), width=100)
    console.print(host_table(states, 4))
    file = console.file
    assert isinstance(file, io.StringIO)
    assert "97 more  97 running" in file.getvalue()


def test_lines_are_shown_as_they_were_printed(capsys: pytest.CaptureFixture[str]) -> None:
    screen = LiveScreen([HostState("a")])
    screen.show(FoldedLine("out", "step:100: [red]loss", hosts=[0]))
    screen.close()
    assert "[w0] step:100: [red]loss\n" in capsys.readouterr().out


def test_a_job_ends_with_its_terminal(stand_in: Pod) -> None:
    ours, theirs = pty.openpty()
    arguments = ["run", "--hosts", "a,b", *stand_in.options, *stand_in.program("sleeper.py")]
    with subprocess.Popen(
        # The terminal becomes the launcher's, whose closing sends it SIGHUP.
        ["setsid", "--ctty", sys.executable, "-m", "polyxla", "pod", *arguments],
        env={**stand_in.environ, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        pids = stand_in.pids(4)
        os.close(ours)
        assert process.wait(30) != 0
    wait_for_end_of(pids)


def test_a_terminal_shows_lines_above_the_table(stand_in: Pod) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "polyxla", "pod", "run", "--hosts", "a,b", *stand_in.options]
    environ = {**stand_in.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen(
        [*command, *stand_in.program("steps.py", "2")],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        shown = b""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                shown += os.read(ours, 65536)
            except OSError:
                break
        os.close(ours)
        assert process.wait(60) == 0
    text = shown.decode()
    assert re.search(r"\[w0(-w1)?\] step 2, loss 0.5", text)
    assert "last line" in text
    rows = [line.split()[:3] for line in text.replace("\x1b[2K", "").splitlines()]
    assert ["w1", "b", "running"] in rows
