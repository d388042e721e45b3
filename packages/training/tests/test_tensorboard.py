"""The TensorBoard files that a Trainer writes."""

from __future__ import annotations

import copy
import re
import sys
import threading
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)
from torch.nn import functional as F

from polyxla import UsageError
from polyxla.plugin import pip_install
from polyxla_training import Trainer

pytestmark = pytest.mark.usefixtures("fake_replicas")


def _trainer(devices: int = 1, **options: Any) -> Trainer:
    return Trainer(**{"runtime": "fake", "devices": devices, "log_dir": None, "progress": False, **options})


def _data(count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, 3, generator=generator)
    return [(x, x @ torch.tensor([[1.0], [-2.0], [0.5]])) for x in inputs]


class _Net(torch.nn.Module):
    # The Trainer lends it.
    log: Any
    log_dict: Any
    trainer: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return F.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Validated(_Net):
    """Its metrics are the means of what it reads, so that a test can know them."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("mean", batch.mean())
        self.log_dict({"first": batch[0], "size": float(len(batch))})

    def test_step(self, batch: torch.Tensor) -> None:
        self.log("test_mean", batch.mean())


REPLICAS = pytest.mark.parametrize("devices", [1, 4], ids=["1-replica", "4-replicas"])


# Sizes 1, 3, 2, 2: a mean of means would be something else.
UNEVEN = [
    torch.tensor([8.0]),
    torch.tensor([0.0, 1.0, 2.0]),
    torch.tensor([4.0, 2.0]),
    torch.tensor([0.0, 7.0]),
]


MEAN, FIRST = 24 / 8, (8 + 0 * 3 + 4 * 2 + 0 * 2) / 8


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(scalar.step, scalar.value) for scalar in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@REPLICAS
def test_tensorboard_gets_steps_and_metrics(
    devices: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs"
    data = _data(4 * devices)
    _trainer(devices, max_epochs=2, log_dir=str(folder), log_every_n_steps=2).fit(_Validated(), data, UNEVEN)
    assert len(list(folder.glob("events.*"))) == 1, "one replica writes for all"
    scalars = _scalars(folder)
    assert [step for step, _ in scalars["loss"]] == [1, 2, 4, 6, 8]
    assert scalars["mean"] == [(4, MEAN), (8, MEAN)]
    assert scalars["first"] == [(4, FIRST), (8, FIRST)]
    assert capsys.readouterr().err == (
        f"polyxla: logging to {folder}; view it with: tensorboard --logdir {folder}\n"
    )


def test_tensorboard_gets_the_loss_of_the_step() -> None:
    module, batches = _Net(), _data(1)
    loss = _Net().training_step(batches[0]).item()
    _trainer(log_dir="here", log_every_n_steps=1).fit(module, batches)
    ((tag, [(step, value)]),) = _scalars(Path("here")).items()
    assert (tag, step) == ("loss", 1)
    assert value == pytest.approx(loss)


@pytest.mark.parametrize(
    ("batches", "steps"),
    [(7, [1, 2, 3, 4, 5, 6, 7]), (23, [1, *range(2, 23, 2), 23]), (503, [1, *range(50, 501, 50), 503])],
)
def test_short_trainings_have_points_and_the_first_and_the_last_step_are_written(
    batches: int, steps: list[int]
) -> None:
    losses: list[float] = []

    class Keeps(_Net):
        def training_step(self, batch: Any) -> torch.Tensor:
            loss = super().training_step(batch)
            losses.append(loss.item())
            return loss

    _trainer(log_dir="here").fit(Keeps(), _data(batches))
    scalars = _scalars(Path("here"))["loss"]
    assert [step for step, _ in scalars] == steps
    assert [value for _, value in scalars] == pytest.approx([losses[step - 1] for step in steps])


def test_the_events_are_on_the_disk_also_after_an_error() -> None:
    class FailsLater(_Net):
        def training_step(self, batch: Any) -> torch.Tensor:
            if self.trainer.global_step == 2:
                raise ZeroDivisionError
            return super().training_step(batch)

    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        _trainer(log_dir="here", log_every_n_steps=1).fit(FailsLater(), _data(4))
    assert threading.active_count() == threads, "the writer is closed"
    assert [step for step, _ in _scalars(Path("here"))["loss"]] == [1, 2]


def test_the_default_directory_is_a_new_one_under_runs() -> None:
    _trainer(log_dir="auto", log_every_n_steps=1).fit(_Net(), _data(1))
    (folder,) = Path("runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-\d+", folder.name)
    assert set(_scalars(folder)) == {"loss"}


def test_without_a_directory_nothing_is_written() -> None:
    _trainer(log_dir=None).fit(_Validated(), _data(2), UNEVEN)
    _trainer(log_dir="auto").test(_Validated(), UNEVEN)
    assert list(Path().iterdir()) == []


def test_without_tensorboard_nothing_is_written_by_default_and_a_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    _trainer(log_dir="auto").fit(_Net(), _data(1))
    assert list(Path().iterdir()) == []
    assert capsys.readouterr().err == (
        "polyxla: TensorBoard is not installed, so nothing is logged: "
        f"{pip_install('polyxla-training[tensorboard]')}\n"
    )


def test_without_tensorboard_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError) as caught:
        _trainer(log_dir="here").fit(_Net(), _data(1))
    assert str(caught.value) == (
        "TensorBoard is not installed (from Trainer(log_dir=...)). "
        f"Install it: {pip_install('polyxla-training[tensorboard]')}, or pass log_dir=None."
    )


class _Drawing(lightning.LightningModule):
    """Writes with the loggers' own libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logger: Any = self.logger
        copied = copy.deepcopy(logger)
        copied.experiment.add_scalar("own", 0.0, self.global_step)
        logger.experiment.add_scalar("own", 2.5, self.global_step)
        logger.log_metrics({"other": 1.5}, self.global_step)
        assert [logger.name for logger in self.loggers] == ["tensorboard", "csv"]
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@REPLICAS
def test_a_module_writes_with_its_loggers_library(devices: int, tmp_path: Path) -> None:
    trainer = _trainer(devices, log_dir=str(tmp_path), loggers=["tensorboard", "csv"])
    trainer.fit(_Drawing(), _data(2 * devices))
    scalars = _scalars(tmp_path)
    assert scalars["own"] == [(0, 2.5), (1, 2.5)], "of ordinal 0 alone"
    assert scalars["other"] == [(0, 1.5), (1, 1.5)]
    assert "loss" in scalars


def test_a_training_without_a_logger_has_none() -> None:
    class Asks(_Net):
        def on_train_start(self) -> None:
            assert (self.trainer.logger, self.trainer.loggers) == (None, [])

    _trainer().fit(Asks(), _data(1))
