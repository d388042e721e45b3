"""The Trainer reads a part of the data, and validates within epochs, or in some of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from polyxla import UsageError
from polyxla_testing import PluginInstaller
from polyxla_training import Trainer
from polyxla_training.options import FitOptions
from polyxla_training.progress import ValidationSchedule, count_batches

RECORDS = 8
REPLICAS = pytest.mark.parametrize("devices", [1, 4], ids=["1-replica", "4-replicas"])


@pytest.fixture(autouse=True)
def _fake(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_plugin.hide_others(keep=["polyxla-training", "polyxla-sampler"])
    install_plugin.fake_runtime()
    monkeypatch.setenv("FAKE_DEVICES", "4")
    monkeypatch.chdir(tmp_path)


def _trainer(devices: int = 1, **options: Any) -> Trainer:
    return Trainer(**{"runtime": "fake", "devices": devices, "log_dir": None, "progress": False, **options})


class _Net(lightning.LightningModule):
    """Keeps the order of its steps: ``t`` and ``v``, and ``e`` at the end of an epoch."""

    def __init__(self, crash_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)
        self.order = ""
        self.crash_at = crash_at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.order.count("t") == self.crash_at:
            raise ZeroDivisionError
        self.order += "t"
        self.log("batches", 1.0, on_epoch=True, reduce_fx="sum")
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.order += "v"
        self.log("val_batches", 1.0, reduce_fx="sum")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_batches", 1.0, reduce_fx="sum")

    def on_train_epoch_end(self) -> None:
        self.order += "e"

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _data(records: int = RECORDS) -> DataLoader[Any]:
    inputs = torch.randn(records, 3, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=1)


def _order(records: int = RECORDS, **options: Any) -> str:
    module = _Net()
    _trainer(**options).fit(module, _data(records), _data(1))
    return module.order


def _in_lightning(**options: Any) -> str:
    module = _Net()
    quiet: Any = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    trainer = lightning.Trainer(accelerator="cpu", devices=1, num_sanity_val_steps=0, **quiet, **options)
    trainer.fit(module, _data(), _data(1))
    return module.order


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "lightnings"),
    [
        ({"val_check_interval": 3}, {}),
        ({"val_check_interval": 4}, {}),
        ({"val_check_interval": 0.25}, {}),
        ({"val_check_interval": 1.0}, {}),
        ({"limit_train_batches": 3}, {}),
        ({"limit_train_batches": 0.5, "val_check_interval": 0.5}, {}),
        ({"limit_val_batches": 0}, {}),
        ({"val_every_n_epochs": 2, "val_check_interval": 4}, {"check_val_every_n_epoch": 2}),
        ({"val_check_interval": 4, "max_steps": 5}, {}),
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()) or "same",
)
def test_validations_come_where_lightning_has_them(
    options: dict[str, Any], lightnings: dict[str, Any]
) -> None:
    given = {name: value for name, value in options.items() if name != "val_every_n_epochs"}
    assert _order(max_epochs=3, **options) == _in_lightning(max_epochs=3, **given, **lightnings)


def test_a_validation_within_an_epoch_leaves_the_epochs_values_alone() -> None:
    metrics = _trainer(val_check_interval=2).fit(_Net(), _data(), _data(3))
    assert metrics == {"batches": RECORDS, "val_batches": 3.0}


@REPLICAS
def test_limits_count_the_batches_of_each_replica(devices: int) -> None:
    trainer = _trainer(devices, limit_train_batches=2, limit_val_batches=1, limit_test_batches=0.5)
    metrics = trainer.fit(_Net(), _data(16), _data(8))
    assert metrics == {"batches": 2 * devices, "val_batches": devices}
    assert trainer.outcome is not None
    assert (trainer.outcome.epochs, trainer.outcome.steps) == (1, 2)
    assert trainer.test(_Net(), _data(8)) == {"test_batches": 4.0}


class _Endless:
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from _data(1)


def test_a_loader_without_a_length_may_have_limits_and_intervals() -> None:
    module = _Net()
    _trainer(max_epochs=2, limit_train_batches=4, val_check_interval=2, limit_val_batches=1).fit(
        module, _Endless(), _Endless()
    )
    assert module.order == "ttvttve" * 2


@REPLICAS
def test_fast_dev_run_runs_every_step_once_and_writes_nothing(devices: int) -> None:
    options: Any = {"max_epochs": 9, "checkpoint_dir": "saved", "log_dir": "logs", "val_every_n_epochs": 3}
    options |= {"save_every_n_steps": 1, "keep": 3, "monitor": "val_batches"}
    trainer = _trainer(devices, fast_dev_run=True, **options)
    assert trainer.fit(_Net(), _data(), _data()) == {"batches": devices, "val_batches": devices}
    assert not {"saved", "logs"} & {path.name for path in Path().iterdir()}
    two = _trainer(devices, fast_dev_run=2, **options)
    assert two.fit(_Net(), _data(), _data()) == {"batches": 2 * devices, "val_batches": 2 * devices}


@pytest.mark.parametrize("crash_at", range(1, 12))
def test_a_resumed_run_makes_the_validations_that_are_left(crash_at: int) -> None:
    options: Any = {"max_epochs": 2, "limit_train_batches": 6, "val_check_interval": 2}
    saves: Any = {"checkpoint_dir": "saved", "save_every_n_steps": 1, "resume": "auto"}
    expected = _order(**options)
    crashed, resumed = _Net(crash_at), _Net()
    with pytest.raises(ZeroDivisionError):
        _trainer(**options, **saves).fit(crashed, _data(), _data(1))
    metrics = _trainer(**options, **saves).fit(resumed, _data(), _data(1))
    assert metrics["batches"] == 6
    # The state is saved after a step and before its validation, which is therefore made again.
    assert crashed.order.removesuffix("v") + resumed.order == expected


def test_an_interval_lies_between_two_updates() -> None:
    assert _order(val_check_interval=0.4, accumulate=2) == "ttvttvttvttve"
    with pytest.raises(UsageError, match=r"val_check_interval=3 is not a multiple of accumulate=2 .*=4\."):
        _trainer(val_check_interval=3, accumulate=2)


@pytest.mark.parametrize("option", ["limit_train_batches", "limit_test_batches", "val_check_interval"])
@pytest.mark.parametrize("value", [0, -1, 0.0, 1.5, True, "2"])
def test_an_invalid_limit_is_refused_at_once(option: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        Trainer(**{option: value})
    assert str(caught.value) == (
        f"{option}={value!r} is neither a number of batches nor a fraction of them (from Trainer). "
        f"Write {option}=10 for ten batches, or {option}=0.1 for a tenth of them."
    )


def test_a_fraction_needs_a_length_and_a_batch() -> None:
    options = FitOptions(limit_train_batches=0.1)
    assert count_batches(20, options, "limit_train_batches") == 2
    for length, said in ((None, "a loader without a length"), (4, "4 batches: less than one")):
        with pytest.raises(UsageError, match=f"limit_train_batches=0.1 is a fraction of {said}"):
            count_batches(length, options, "limit_train_batches")


def test_an_interval_longer_than_an_epoch_is_refused() -> None:
    with pytest.raises(UsageError, match="val_check_interval=9 is more than the 8 batches of an epoch"):
        ValidationSchedule.of(FitOptions(val_check_interval=9), 8)
