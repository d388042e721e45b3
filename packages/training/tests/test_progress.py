"""ProgressListener is a bar on a terminal and plain lines elsewhere."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from polyxla_training.listeners.progress import ProgressListener
from polyxla_training.observe.step_counters import LoggedValues

TIMEOUT_S = 60.0
PROGRAMS = Path(__file__).parent / "programs"
EPOCHS = 2
OPTIMIZER = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def _lines(text: str) -> list[str]:
    """Lines without their times."""
    return [re.sub(r"\d+\.\d s: ", "T: ", line) for line in text.splitlines()]


def test_without_a_terminal_each_epoch_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressListener(EPOCHS, 2, LoggedValues(every_n_steps=3), OPTIMIZER)
    for step in range(1, 5):
        progress.polyxla_step_finished(step=step, logged={"loss": 1 / step, "lr": 0.1})
        if step % 2 == 0:
            progress.polyxla_metrics_ready(step=step, metrics={"val_loss": 0.123456})
    progress.polyxla_replica_stopped()
    assert _lines(capsys.readouterr().err) == [
        "polyxla: epoch 1/2, step 2, T: loss 0.5  lr 0.1",
        "polyxla: metrics, step 2, T: val_loss 0.1235",
        "polyxla: epoch 2/2, step 4, T: loss 0.25  lr 0.1",
        "polyxla: metrics, step 4, T: val_loss 0.1235",
    ]


def test_without_a_length_only_metrics_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressListener(EPOCHS, None, LoggedValues(every_n_steps=3), OPTIMIZER)
    for step in range(1, 5):
        progress.polyxla_step_finished(step=step, logged={"loss": 1.0})
    progress.polyxla_metrics_ready(step=4, metrics={"val_loss": 2.0})
    assert _lines(capsys.readouterr().err) == ["polyxla: metrics, step 4, T: val_loss 2"]


class _Counted:
    """A value that counts how often it is read, which waits for the device."""

    reads = 0

    def __float__(self) -> float:
        _Counted.reads += 1
        return 1.0


def test_values_are_read_only_in_steps_that_show_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Counted, "reads", 0)
    progress = ProgressListener(EPOCHS, 100, LoggedValues(every_n_steps=3), OPTIMIZER)
    for step in range(1, 101):
        progress.polyxla_step_finished(step=step, logged={"loss": _Counted()})
    assert _Counted.reads == 1 + 33 + 1, "the first, every 3rd step and the epoch's last"


def _on_a_terminal(program: Path, *arguments: str) -> str:
    """Run a program with its standard error on a terminal; return what that shows."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    try:
        with subprocess.Popen(
            [sys.executable, program, *arguments], stdout=subprocess.PIPE, stderr=theirs, env=environ
        ) as child:
            os.close(theirs)
            shown = _read_to_end(ours)
            assert child.stdout is not None
            assert child.stdout.read() == b"", "standard output is the program's"
            assert child.wait(TIMEOUT_S) == 0, shown
    finally:
        os.close(ours)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)


def _read_to_end(terminal: int) -> str:
    shown = b""
    deadline = time.monotonic() + TIMEOUT_S
    while select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # how Linux says that the other side has closed
            return shown.decode()
        if not piece:
            return shown.decode()
        shown += piece
    raise AssertionError(f"the terminal stays open: {shown!r}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "last"),
    [
        pytest.param(
            2,
            r"epoch 2/2 ━+ 4/4 .* it/s  lr 0\.01 to 0\.1  loss 0\.25  val_loss 0\.5  loss\[test\] 0\.5",
            id="known-length",
        ),
        pytest.param(
            None,
            r"training .+ 4/\? .* it/s  loss 0\.25  val_loss 0\.5  loss\[test\] 0\.5",
            id="unknown-length",
        ),
    ],
)
def test_on_a_terminal_there_is_a_bar(steps: int | None, last: str) -> None:
    shown = _on_a_terminal(PROGRAMS / "progress_bar.py", *([] if steps is None else [str(steps)]))
    lines = [line.strip() for line in re.split(r"[\r\n]+", shown) if line.strip()]
    assert re.fullmatch(last, lines[-1]), shown
    assert "polyxla:" not in shown
