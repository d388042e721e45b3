"""A Trainer whose checkpoints and logs are in an object store."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from polyxla import UsageError
from polyxla_testing.processes import wait_until
from polyxla_training import CheckpointFolder, Trainer, commands
from polyxla_training.checkpoint.stop_signal import stop_file
from polyxla_training.listeners import log_upload
from polyxla_training.listeners.log_upload import DirectoryUpload
from polyxla_training.observe import read_run
from polyxla_training.storage import RemotePath

if TYPE_CHECKING:
    from conftest import S3Server

pytestmark = pytest.mark.usefixtures("fake_replicas")
TIMEOUT_S = 60.0


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of temporary files, which is empty."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


class _StopError(Exception):
    """Ends a run at a step, as a crash does."""


class _Net(torch.nn.Module):
    def __init__(self, at: int = -1, then: Callable[[], None] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)
        self.steps, self._at, self._then = 0, at, then

    def training_step(self, batch: Any) -> torch.Tensor:
        if self.steps == self._at:
            if self._then is None:
                raise _StopError
            self._then()
        self.steps += 1
        inputs, targets = batch
        return F.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def _fit(module: _Net, **options: Any) -> Trainer:
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(inputs, torch.arange(40.0)[:, None]), batch_size=2)
    given = {"devices": 1, "log_dir": None, "max_steps": 8, "seed": 4, **options}
    if "checkpoint_dir" in given:
        given.setdefault("save_every_n_steps", 1)
    trainer = Trainer(runtime="fake", progress=False, max_epochs=2, **given)
    trainer.fit(module, data)
    return trainer


def _names(url: str) -> list[str]:
    store, path = fsspec.url_to_fs(url)
    store.invalidate_cache()
    return [name.rpartition("/")[2] for name in store.find(path)]


def test_a_run_that_crashed_resumes_from_the_store(remote: str) -> None:
    whole, crashed, resumed = _Net(), _Net(at=5), _Net()
    _fit(whole)
    with pytest.raises(_StopError):
        _fit(crashed, checkpoint_dir=remote, resume="auto")
    _fit(resumed, checkpoint_dir=remote, resume="auto")
    assert crashed.steps + resumed.steps == whole.steps == 8
    assert torch.equal(resumed.layer.weight, whole.layer.weight)
    assert _names(remote) == ["step-00000007.safetensors", "step-00000008.safetensors"], "keep is 2"
    again = _Net()
    _fit(again, resume=f"{remote}/step-00000007.safetensors")
    assert again.steps == 1
    assert list(Path().iterdir()) == [], "nothing is written to this machine"


def test_four_replicas_resume_from_the_store(remote: str) -> None:
    options = {"devices": 4, "checkpoint_dir": remote, "resume": "auto"}
    _fit(_Net(), **options | {"max_steps": 2})
    trainer = _fit(_Net(), **options)
    assert trainer.outcome is not None
    assert trainer.outcome.steps == 8
    assert [entry.step for entry in CheckpointFolder(remote).entries()] == [7, 8]


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """The signals that would have ended this process."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, before)


def test_on_sigterm_it_saves_to_the_store(remote: str, ended: list[int]) -> None:
    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        # The main thread handles it, and may wait for its turn during all steps.
        wait_until(stop_file(remote).exists, "the signal is handled")

    module = _Net(at=3, then=end)
    _fit(module, checkpoint_dir=remote, save_every_n_steps=None, max_steps=20)
    assert ended == [signal.SIGTERM]
    assert module.steps < 20
    assert [entry.step for entry in CheckpointFolder(remote).entries()] == [module.steps]
    assert not stop_file(remote).exists()


def test_an_upload_that_fails_ends_the_training_with_the_url(s3: S3Server) -> None:
    module = _Net(at=2, then=lambda: s3.fail("PUT", 403))
    with pytest.raises(UsageError, match=r"'s3://bucket/run/step-0000000\d\.safetensors' cannot be written"):
        _fit(module, checkpoint_dir="s3://bucket/run")
    assert module.steps < 8


def test_logs_are_in_the_store_also_of_two_runs(remote: str, capsys: pytest.CaptureFixture[str]) -> None:
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps in (2, 4):
        _fit(_Net(), log_dir=remote, log_every_n_steps=1, max_steps=steps)
    assert f"view it with: tensorboard --logdir {remote}\n" in capsys.readouterr().err
    assert list(Path().iterdir()) == []
    store, path = fsspec.url_to_fs(remote)
    store.invalidate_cache()
    store.get(path, "copy", recursive=True)
    log = next(Path("copy").rglob("run.jsonl"))
    assert read_run(remote) == read_run(f"{remote}/run.jsonl") == read_run(log)
    commands.report([remote])
    assert "wrote report.html" in capsys.readouterr().out
    assert Path("report.html").read_text().startswith("<!doctype html>")
    with pytest.raises(UsageError, match=f"there is no run.jsonl \\(from {remote}/none\\)"):
        read_run(f"{remote}/none")
    assert log.read_text().count('"event": "start"') == 2, "the second run is appended"
    assert [event["step"] for event in read_run(log) if event["event"] == "step"] == [1, 2, 3, 4]
    events = sorted(Path("copy").rglob("events.*"), key=lambda path: path.stat().st_size)
    assert len(events) == 2
    found = tensorboard.EventAccumulator(str(events[-1]))
    found.Reload()
    assert [scalar.step for scalar in found.Scalars("loss")] == [1, 2, 3, 4]


def test_logs_that_cannot_be_uploaded_stay_on_this_machine(
    s3: S3Server, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = _Net(at=1, then=lambda: s3.fail("PUT", 403))
    trainer = _fit(module, log_dir="s3://bucket/logs", log_every_n_steps=1)
    assert trainer.outcome is not None
    assert trainer.outcome.steps == 8
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "cannot be written" in line]
    assert line.startswith("polyxla: s3://bucket/logs/")
    left = Path(line.rpartition("the files stay in ")[2])
    assert left.parent == temporary
    assert len(read_run(left)) > 8


def test_a_log_that_cannot_be_continued_is_an_error_before_training(
    s3: S3Server, temporary: Path, tmp_path: Path
) -> None:
    _fit(_Net(), log_dir="s3://bucket/logs", max_steps=1)
    s3.fail("GET", 403)
    module = _Net()
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UsageError, match=r"'s3://bucket/logs' cannot be read: .*Trainer\(log_dir"):
        _fit(module, log_dir="s3://bucket/logs", checkpoint_dir=tmp_path / "checkpoints", max_steps=1)
    assert module.steps == 0
    assert signal.getsignal(signal.SIGTERM) is handler, "the listener of checkpoints was stopped"
    assert list(temporary.iterdir()) == []


def test_a_logger_that_fails_ends_the_upload(remote: str, temporary: Path) -> None:
    with pytest.raises(TypeError, match="unknown"):
        _fit(_Net(), log_dir=remote, loggers={"csv": {"unknown": 1}}, max_steps=1)
    assert list(temporary.iterdir()) == []
    assert "polyxla-log-upload" not in {thread.name for thread in threading.enumerate()}


def test_files_are_uploaded_while_they_grow(remote: str, wait_for: Callable[..., None]) -> None:
    def content() -> bytes:
        try:
            return (RemotePath(remote) / "sub/log").read_bytes()
        except FileNotFoundError:
            return b""

    upload = DirectoryUpload(RemotePath(remote), every_s=0.05)
    (upload.path / "sub").mkdir()
    with (upload.path / "sub" / "log").open("w") as file:
        for text in ("one\n", "two\n"):
            file.write(text)
            file.flush()
            wait_for(lambda text=text: content().endswith(text.encode()))
        file.write("last\n")
    upload.close()
    assert content() == b"one\ntwo\nlast\n"
    assert not upload.path.exists()


def test_an_upload_that_fails_once_is_repeated(
    s3: S3Server, wait_for: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    s3.fail("PUT", 403, count=1)
    upload = DirectoryUpload(RemotePath("s3://bucket/logs"), every_s=0.05)
    (upload.path / "log").write_text("one\n")
    wait_for(lambda: _names("s3://bucket/logs") == ["log"])
    upload.close()
    assert "s3://bucket/logs/log cannot be written" in capsys.readouterr().err
    assert log_upload.EVERY_S == 60
