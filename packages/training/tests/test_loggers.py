"""`Trainer(loggers=...)`: the file of comma-separated values, and what is refused."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyxla import UsageError
from polyxla.plugin import pip_install
from polyxla_training import Trainer
from polyxla_training.listeners.loggers import CsvLogger
from polyxla_training.listeners.profiling import ProfileListener
from polyxla_training.observe import read_run

PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT_S = 280.0
"""Longest run of a program, in seconds: less than a test's, on a machine that does much else."""
pytestmark = pytest.mark.usefixtures("fake_replicas")


class _Net(torch.nn.Module):
    log: Any

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).sum()
        return loss

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("val, mean", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(devices: int = 1, batches: int = 5, **options: Any) -> None:
    trainer = Trainer(runtime="fake", devices=devices, progress=False, log_every_n_steps=2, **options)
    trainer.fit(_Net(), [torch.ones(1, 1)] * batches * devices, [torch.full((1, 1), 0.5)] * devices)


def _rows(path: Path) -> list[tuple[int, str]]:
    with path.open(newline="") as file:
        return [(int(row["step"]), row["name"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("devices", [1, 4])
def test_csv_has_a_row_for_each_value_and_a_resumed_training_appends(
    devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options: Any = {"log_dir": "here", "loggers": ["csv"], "checkpoint_dir": "saved", "resume": "auto"}
    for epochs in (1, 2):
        _fit(devices, max_epochs=epochs, **options)
    epoch = [(step, "loss") for step in (1, 2, 4)]
    rows = _rows(Path("here/metrics.csv"))
    assert rows[:5] == [*epoch, (5, "val, mean"), (5, "loss")]
    assert rows[5:] == [(step, "loss") for step in (6, 8, 10)] + [(10, "val, mean")]
    assert Path("here/metrics.csv").read_text().count("step,name,value") == 1
    assert not list(Path("here").glob("events.*"))
    assert capsys.readouterr().err.count("polyxla: logging to here\n") == 2


def test_several_loggers_write_and_the_run_log_has_their_names_not_their_arguments() -> None:
    _fit(log_dir="here", loggers={"csv": {}, "tensorboard": {"flush_secs": 1}})
    assert list(Path("here").glob("events.*"))
    assert (5, "loss") in _rows(Path("here/metrics.csv"))
    settings = read_run(Path("here"))[0]["settings"]
    assert (settings["loggers"], settings["callbacks"]) == (["csv", "tensorboard"], [])


def test_without_tensorboard_another_logger_has_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    _fit(loggers=["csv"])
    (directory,) = Path("runs").iterdir()
    assert (directory / "metrics.csv").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"loggers": ["neptune"]},
            (
                "there is no logger 'neptune' (from Trainer(loggers=...)). "
                "Write one of tensorboard, csv, wandb, mlflow, as in loggers=['csv']."
            ),
        ),
        (
            {"loggers": "csv"},
            (
                "loggers='csv' is not a list (from Trainer). "
                "Write one of tensorboard, csv, wandb, mlflow, as in loggers=['csv']."
            ),
        ),
        (
            {"loggers": ["csv"], "log_dir": None},
            (
                "logger 'csv' writes files to log_dir, which is None (from Trainer(loggers=...)). "
                "Write log_dir='runs/mine', or leave log_dir out."
            ),
        ),
    ],
)
def test_an_invalid_logger_is_refused_at_once(options: Any, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Trainer(**options)
    assert str(caught.value) == text


@pytest.mark.parametrize(("name", "title"), [("wandb", "wandb"), ("mlflow", "MLflow")])
def test_a_library_that_is_missing_is_named(name: str, title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError) as caught:
        _fit(log_dir=None, loggers=[name])
    assert str(caught.value) == (
        f"{title} is not installed (from Trainer(loggers=...)). "
        f"Install it: {pip_install(f'polyxla-training[{name}]')}."
    )


@pytest.mark.slow
def test_a_full_disk_under_the_logs_ends_no_training(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=256k none "$0" && exec "$@"', str(disk)]
    if subprocess.run([*mount, "true"], capture_output=True, timeout=TIMEOUT_S, check=False).returncode:
        pytest.skip("this machine does not allow mounts")
    command = [*mount, sys.executable, str(PROGRAMS / "full_log_dir.py"), str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    *steps, error = done.stdout.splitlines()
    assert steps == ["mid: 300 steps", "full: 300 steps"]
    assert "cannot be written: No space left on device" in error, "a checkpoint is worth an error"
    lost = [line for line in done.stderr.splitlines() if "training goes on: " in line]
    assert all(line.endswith("No space left on device") for line in lost)
    assert [sum(name in line for line in lost) for name in ("mid/run.jsonl", "disk/mid")] == [1, 1]
    # The disk is full already, so files may be made or not; either way each log is lost once.
    for name in ("'csv'", "'tensorboard'", "run.jsonl", "is not written, and"):
        assert 1 <= sum(name in line for line in lost) <= 3
    assert "Traceback" not in done.stderr


class _ServerError(Exception):
    """An error as a logger's own library raises it."""


def test_a_logger_that_fails_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(_: Any, step: int, values: Mapping[str, float]) -> None:
        raise _ServerError(f"no answer at step {step}")

    monkeypatch.setattr(CsvLogger, "write", write)
    _fit(log_dir="here", loggers=["csv"])
    assert read_run(Path("here"))[-1]["error"] is None
    assert capsys.readouterr().err == (
        "polyxla: logging to here\n"
        "polyxla: the log of 'csv' is not written any more, and training goes on: no answer at step 1\n"
    )


def test_a_directory_that_may_not_be_written_is_refused_at_the_start() -> None:
    Path("file").touch()
    with pytest.raises(UsageError) as caught:
        _fit(log_dir="file/logs", loggers=["csv"])
    assert str(caught.value).startswith("'file/logs' cannot be written: [Errno 20] Not a directory")
    assert str(caught.value).endswith(
        "(from Trainer(log_dir=...)). Name a directory that this process may write, or None."
    )


def test_a_profile_that_cannot_be_written_ends_no_training(capsys: pytest.CaptureFixture[str]) -> None:
    class Profile:
        def __enter__(self) -> Any:
            return lambda _: None

        def __exit__(self, *_: object) -> None:
            raise OSError(28, "No space left on device")

    replica: Any = SimpleNamespace(steps=0, sync=lambda **_: None, profile=lambda _: Profile())
    listener = ProfileListener(replica, (1, 1), "here")
    listener.polyxla_step_finished(replica, 1)
    listener.polyxla_replica_stopped()
    assert capsys.readouterr().err == (
        "polyxla: the profile in here/profile is not written any more, and training goes on: "
        "[Errno 28] No space left on device\n"
    )
