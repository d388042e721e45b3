"""Background writing: the state at the time of submission, one at a time, and no error is lost."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from polyxla_training.checkpoint import BackgroundWriter, CheckpointError, CheckpointFolder, load, save

TIMEOUT_S = 60.0
PROCESS_TIMEOUT_S = 240.0
"""`import torch` alone takes 10 seconds of a core where TorchTPU is installed."""
PROGRAMS = Path(__file__).parent / "programs"


class _Gate:
    """Saves once it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.saved: list[Any] = []

    def save(self, path: Path, state: Any) -> None:
        assert self.opened.wait(TIMEOUT_S)
        save(state, path)
        self.saved.append(path.name)


def _fail(state: object) -> None:
    raise OSError("the disk is gone")


def test_the_state_is_as_it_was_when_it_was_submitted(tmp_path: Path) -> None:
    gate, weight = _Gate(), torch.ones(4)
    state: dict[str, Any] = {"weight": weight, "tied": weight.view(2, 2), "steps": [1]}
    with BackgroundWriter() as writer:
        writer.submit(functools.partial(gate.save, tmp_path / "state"), state)
        weight.zero_()
        state["steps"].append(2)
        assert gate.saved == []
        gate.opened.set()
    loaded = load(tmp_path / "state")
    assert loaded["weight"].tolist() == [1.0] * 4
    assert loaded["tied"].data_ptr() == loaded["weight"].data_ptr()
    assert loaded["steps"] == [1]


def test_the_next_waits_for_the_one_before(tmp_path: Path) -> None:
    gate, writer = _Gate(), BackgroundWriter()
    writer.submit(functools.partial(gate.save, tmp_path / "first"), [1])
    threading.Timer(0.05, gate.opened.set).start()
    writer.submit(functools.partial(gate.save, tmp_path / "second"), [2])
    assert gate.saved[0] == "first", "it was finished before this one began"
    writer.close()
    assert gate.saved == ["first", "second"]


def test_checkpoints_are_saved_in_the_background(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=2)
    with BackgroundWriter() as writer:
        for step in range(5):
            writer.submit(functools.partial(checkpoints.save, step), [torch.tensor(step)])
    assert [entry.step for entry in checkpoints.entries()] == [3, 4]
    found = checkpoints.load_latest()
    assert found is not None
    assert found[1][0].item() == 4


def test_an_error_comes_with_the_next_submit_once(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    writer.submit(_fail, [1])
    with pytest.raises(OSError, match="the disk is gone"):
        writer.submit(functools.partial(_Gate().save, tmp_path / "never"), [2])
    assert list(tmp_path.iterdir()) == [], "the state submitted with it was not written"
    writer.close()


def test_an_error_of_the_last_one_comes_with_close() -> None:
    writer = BackgroundWriter()
    writer.submit(_fail, [1])
    with pytest.raises(OSError, match="the disk is gone"):
        writer.close()
    with pytest.raises(OSError, match="the disk is gone"), BackgroundWriter() as other:
        other.submit(_fail, [1])


def _train_and_fail() -> None:
    with BackgroundWriter() as writer:
        writer.submit(_fail, [1])
        raise ZeroDivisionError


def test_what_ended_training_is_not_hidden_by_a_write_that_failed() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        _train_and_fail()
    assert caught.value.__notes__ == ["the last checkpoint was not written either: the disk is gone"]


def test_a_state_that_cannot_be_kept_is_refused_at_once(tmp_path: Path) -> None:
    with BackgroundWriter() as writer, pytest.raises(CheckpointError, match=r"state\['hook'\] is a"):
        writer.submit(functools.partial(_Gate().save, tmp_path / "never"), {"hook": print})


def test_waiting_for_a_write_times_out(tmp_path: Path) -> None:
    gate, writer = _Gate(), BackgroundWriter(timeout_s=0.05)
    writer.submit(functools.partial(gate.save, tmp_path / "state"), [1])
    for wait in (writer.close, functools.partial(writer.submit, _fail, [2])):
        with pytest.raises(CheckpointError, match=r"writing a checkpoint has taken longer than 0\.05 s"):
            wait()
    gate.opened.set()
    for thread in threading.enumerate():
        if thread.name == "polyxla-checkpoint-writer":
            thread.join(TIMEOUT_S)
    writer.close()
    assert load(tmp_path / "state") == [1]


@pytest.mark.slow
def test_a_process_ends_after_its_writes_and_a_forked_one_writes_its_own(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAMS / "write_at_exit.py", str(tmp_path / "state")],
        check=True,
        timeout=PROCESS_TIMEOUT_S,
    )
    assert load(tmp_path / "state") == ["of the parent"]
    assert load(tmp_path / "state-child") == ["of the child"]
