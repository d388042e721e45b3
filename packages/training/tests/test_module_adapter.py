"""A module's side: optimizers and schedules in every form, steps and what they return, what is lent."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from polyxla import UsageError
from polyxla.plugin import World
from polyxla_testing import PluginInstaller
from polyxla_training import Trainer
from polyxla_training.lightning.callbacks import LightningCallbacks
from polyxla_training.lightning.data import resolve_loader
from polyxla_training.lightning.hooks import check_module
from polyxla_training.lightning.schedulers import Schedulers, configure_optimizers
from polyxla_training.lightning.trainer_view import TrainerView
from polyxla_training.metrics import MetricAccumulator
from polyxla_training.module_adapter import ModuleAdapter
from polyxla_training.options import FitOptions
from polyxla_training.progress import Progress


def _halving(optimizer: Optimizer) -> ExponentialLR:
    return ExponentialLR(optimizer, 0.5)


class _Net(torch.nn.Module):
    # Attributes that a test looks at or replaces.
    seen: Any
    log: Any
    trainer: Any
    on_train_start: Any

    def __init__(self, configure: Callable[[Optimizer], Any] = lambda optimizer: optimizer) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.configure = configure

    def configure_optimizers(self) -> Any:
        return self.configure(SGD([self.weight], lr=1.0))

    def training_step(self, batch: Any) -> Any:
        return (self.weight * batch).sum()


def _rate(optimizer: Optimizer) -> float:
    rate: float = optimizer.param_groups[0]["lr"]
    return rate


def _stepped(schedulers: Schedulers, optimizer: Optimizer, steps: int, epochs: int) -> float:
    optimizer.step()
    for _ in range(steps):
        schedulers.step_finished()
    for _ in range(epochs):
        schedulers.epoch_finished()
        schedulers.metrics_ready({})
    return _rate(optimizer)


@pytest.mark.parametrize(
    "configure",
    [
        pytest.param(lambda optimizer: optimizer, id="optimizer"),
        pytest.param(lambda optimizer: [optimizer], id="list"),
        pytest.param(lambda optimizer: (optimizer,), id="tuple"),
        pytest.param(lambda optimizer: ([optimizer], []), id="lists"),
        pytest.param(lambda optimizer: {"optimizer": optimizer}, id="dict"),
        pytest.param(lambda optimizer: [{"optimizer": optimizer}], id="list-of-dict"),
        pytest.param(lambda optimizer: {"optimizer": optimizer, "lr_scheduler": None}, id="dict-with-none"),
    ],
)
def test_an_optimizer_without_schedules(configure: Callable[[Optimizer], Any]) -> None:
    optimizer, schedulers = configure_optimizers(_Net(configure))
    assert isinstance(optimizer, SGD)
    assert _stepped(schedulers, optimizer, 3, 3) == 1.0


@pytest.mark.parametrize(
    "configure",
    [
        pytest.param(lambda optimizer: ([optimizer], [_halving(optimizer)]), id="lists"),
        pytest.param(lambda optimizer: [[optimizer], [_halving(optimizer)]], id="list-of-lists"),
        pytest.param(lambda optimizer: ([optimizer], _halving(optimizer)), id="bare-schedule"),
        pytest.param(
            lambda optimizer: ([optimizer], [{"scheduler": _halving(optimizer)}]), id="lists-with-dict"
        ),
        pytest.param(
            lambda optimizer: {"optimizer": optimizer, "lr_scheduler": _halving(optimizer)}, id="dict"
        ),
        pytest.param(
            lambda optimizer: {"optimizer": optimizer, "lr_scheduler": {"scheduler": _halving(optimizer)}},
            id="dicts",
        ),
        pytest.param(
            lambda optimizer: ({"optimizer": optimizer, "lr_scheduler": _halving(optimizer)},),
            id="tuple-of-dict",
        ),
    ],
)
def test_a_schedule_counts_epochs_by_default(configure: Callable[[Optimizer], Any]) -> None:
    optimizer, schedulers = configure_optimizers(_Net(configure))
    assert _stepped(schedulers, optimizer, 5, 0) == 1.0
    assert _stepped(schedulers, optimizer, 0, 2) == 0.25


@pytest.mark.parametrize(
    ("config", "steps", "epochs", "rate"),
    [
        pytest.param({"interval": "step"}, 3, 2, 1 / 8, id="steps"),
        pytest.param({"interval": "step", "frequency": 2}, 5, 0, 1 / 4, id="every-2nd-step"),
        pytest.param({"interval": "epoch", "frequency": 3}, 9, 7, 1 / 4, id="every-3rd-epoch"),
        pytest.param({"interval": "epoch"}, 9, 1, 1 / 2, id="epochs"),
    ],
)
def test_intervals_and_frequencies(config: dict[str, Any], steps: int, epochs: int, rate: float) -> None:
    optimizer, schedulers = configure_optimizers(
        _Net(
            lambda optimizer: {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": _halving(optimizer), **config},
            }
        )
    )
    assert _stepped(schedulers, optimizer, steps, epochs) == rate


def test_several_schedules_each_count_for_themselves() -> None:
    optimizer, schedulers = configure_optimizers(
        _Net(
            lambda optimizer: (
                [optimizer],
                [{"scheduler": _halving(optimizer), "interval": "step"}, ExponentialLR(optimizer, 0.1)],
            )
        )
    )
    assert _stepped(schedulers, optimizer, 2, 1) == pytest.approx(0.025)


def _plateau(optimizer: Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.1, patience=0)


@pytest.mark.parametrize(
    "configure",
    [
        pytest.param(
            lambda optimizer: {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": _plateau(optimizer), "monitor": "val_loss"},
            },
            id="in-the-schedule",
        ),
        pytest.param(
            lambda optimizer: {
                "optimizer": optimizer,
                "lr_scheduler": _plateau(optimizer),
                "monitor": "val_loss",
            },
            id="beside-the-schedule",
        ),
    ],
)
def test_a_plateau_schedule_receives_its_monitored_metric(configure: Callable[[Optimizer], Any]) -> None:
    optimizer, schedulers = configure_optimizers(_Net(configure))
    for loss, rate in ((1.0, 1.0), (0.5, 1.0), (0.7, 0.1)):
        schedulers.epoch_finished()
        schedulers.metrics_ready({"val_loss": loss, "other": -loss})
        assert math.isclose(_rate(optimizer), rate)


@pytest.mark.parametrize("monitor", ["val_acc", None])
def test_a_plateau_schedule_whose_metric_was_not_logged_is_refused(monitor: str | None) -> None:
    config = {"monitor": monitor} if monitor else {}
    _, schedulers = configure_optimizers(
        _Net(lambda optimizer: ([optimizer], [{"scheduler": _plateau(optimizer), **config}]))
    )
    schedulers.epoch_finished()
    with pytest.raises(UsageError) as caught:
        schedulers.metrics_ready({"val_loss": 1.0, "a": 2.0})
    assert str(caught.value) == (
        f"ReduceLROnPlateau monitors {monitor!r}, which was not logged (logged: ['a', 'val_loss']) "
        "(from configure_optimizers). Name a logged metric: {'scheduler': ..., 'monitor': 'val_loss'}."
    )


def test_a_schedule_with_a_monitor_that_needs_none_is_stepped() -> None:
    optimizer, schedulers = configure_optimizers(
        _Net(lambda optimizer: ([optimizer], [{"scheduler": _halving(optimizer), "monitor": "never logged"}]))
    )
    assert _stepped(schedulers, optimizer, 0, 1) == 0.5


@pytest.mark.parametrize(
    ("configure", "count"),
    [
        pytest.param(lambda _: None, 0, id="none"),
        pytest.param(lambda _: [], 0, id="empty"),
        pytest.param(lambda optimizer: [optimizer, Adam(optimizer.param_groups)], 2, id="two"),
        pytest.param(lambda optimizer: ([optimizer, optimizer], []), 2, id="two-in-lists"),
        pytest.param(
            lambda optimizer: ({"optimizer": optimizer}, {"optimizer": optimizer}), 2, id="two-dicts"
        ),
        pytest.param(lambda _: "adam", 1, id="name"),
        pytest.param(lambda optimizer: {"optimiser": optimizer}, 1, id="misspelt-key"),
    ],
)
def test_any_other_number_of_optimizers_is_refused(configure: Callable[[Optimizer], Any], count: int) -> None:
    with pytest.raises(UsageError) as caught:
        configure_optimizers(_Net(configure))
    assert str(caught.value).startswith(f"configure_optimizers returned {count} optimizers: ")
    assert str(caught.value).endswith(
        "(from _Net.configure_optimizers). "
        "Return one torch optimizer; for several, write the loop with polyxla.launch."
    )


def _steps(module: Any) -> ModuleAdapter:
    view = TrainerView(World(), FitOptions(), Progress())
    return ModuleAdapter(module, MetricAccumulator(), view, LightningCallbacks((), view))


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda loss: loss, id="tensor"),
        pytest.param(lambda loss: {"loss": loss, "extra": 1}, id="dict"),
    ],
)
def test_the_loss_of_a_step(answer: Callable[[Any], Any]) -> None:
    module = _Net()
    module.training_step = lambda batch: answer((module.weight * batch).sum())  # type: ignore[method-assign]
    assert _steps(module).loss(torch.tensor([1.0, 2.0]), 0).item() == 3.0


@pytest.mark.parametrize(
    ("answer", "described"),
    [
        pytest.param(None, "None, not a tensor", id="none"),
        pytest.param(1.5, "1.5, not a tensor", id="number"),
        pytest.param({"losses": 1}, "None, not a tensor", id="dict-without-loss"),
        pytest.param(torch.ones(()), "a tensor that does not depend on the parameters", id="detached"),
        pytest.param(
            {"loss": torch.ones(())}, "a tensor that does not depend on the parameters", id="in-a-dict"
        ),
    ],
)
def test_a_step_without_a_loss_that_can_be_trained_on_is_refused(answer: Any, described: str) -> None:
    class Answers(_Net):
        def training_step(self, batch: Any) -> Any:
            return answer

    with pytest.raises(UsageError) as caught:
        _steps(Answers()).loss(torch.zeros(2), 0)
    assert str(caught.value) == (
        f"training_step returned {described} (from Answers.training_step). "
        "Return the loss: a tensor of one element computed from the parameters, "
        "or a dict with it under 'loss'."
    )


class _Indexed(_Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen = (batch, batch_idx)

    def test_step(self, batch: Any) -> None:
        self.seen = (batch, "no index")


def test_a_step_with_two_parameters_receives_the_batch_index() -> None:
    module = _Indexed()
    steps = _steps(module)
    steps.evaluate("validation", "batch", 7)
    assert module.seen == ("batch", 7)
    steps.evaluate("test", "batch", 7)
    assert module.seen == ("batch", "no index")


def test_data_for_a_missing_step_is_refused() -> None:
    steps = _steps(_Net())
    with pytest.raises(UsageError) as caught:
        steps.require("validation")
    assert str(caught.value) == (
        "_Net has no validation_step, but was given data for it (from the validation loader). "
        "Write validation_step(self, batch), or pass no validation data."
    )
    _steps(_Indexed()).require("validation")


class _WithOwnLog(_Net):
    def log(self, name: str, value: Any) -> None:
        self.logged = (name, value)


def test_lent_attributes_are_taken_back() -> None:
    module = _Net()
    before = dict(vars(module))
    steps = _steps(module)
    module.log("a", 1)
    assert module.trainer.max_epochs == 1
    steps.release()
    assert dict(vars(module)) == before
    assert not hasattr(module, "log")


class _KeepsItself(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).sum()
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        copies = [copy.deepcopy(self), pickle.loads(pickle.dumps(self)), AveragedModel(self).module]
        for found in copies:
            assert torch.equal(found.layer.weight, self.layer.weight)
            assert found.layer.weight is not self.layer.weight
            # The training lends methods that belong to its replica.
            assert not {"log", "all_gather", "optimizers", "clip_gradients"} & vars(found).keys()
        optimizer: Any = self.optimizers()
        self.clip_gradients(optimizer, 1.0)


def test_a_module_can_be_copied_while_it_is_trained(install_plugin: PluginInstaller) -> None:
    install_plugin.fake_runtime()
    trainer = Trainer(runtime="fake", devices=1, log_dir=None, progress=False)
    values: Any = torch.ones(2, 2)
    trainer.fit(_KeepsItself(), DataLoader(values))
    assert "loss" in trainer.metrics


def test_a_modules_own_log_is_not_replaced() -> None:
    module = _WithOwnLog()
    steps = _steps(module)
    module.log("a", 1)
    assert module.logged == ("a", 1)
    steps.release()
    assert type(module.log).__name__ == "method"


def test_hooks_are_called_if_they_exist() -> None:
    module = _Net()
    called: list[str] = []
    module.on_train_start = lambda: called.append("start")
    steps = _steps(module)
    steps.call("on_train_start")
    steps.call("on_train_end")
    assert called == ["start"]


class _Manual(_Net):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "methods", "text"),
    [
        pytest.param(
            torch.nn.Linear(1, 1),
            ["training_step", "configure_optimizers"],
            "Linear has no training_step and no configure_optimizers (from the module passed to Trainer). "
            "Write the method, or use polyxla.launch with your own loop.",
            id="methods",
        ),
        pytest.param(
            _Manual(),
            ["training_step"],
            "_Manual sets automatic_optimization=False, which Trainer does not support "
            "(from the module passed to Trainer). "
            "Use polyxla.launch with your own loop and replica.step.",
            id="manual",
        ),
    ],
)
def test_modules_that_cannot_be_trained_are_refused_early(module: Any, methods: list[str], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_module(module, methods)
    assert str(caught.value) == text


class _WithData(_Net):
    def train_dataloader(self) -> list[int]:
        return [1, 2]


def test_a_loader_that_is_passed_wins_over_the_modules_own() -> None:
    assert resolve_loader(_WithData(), [3], "train_dataloader") == [3]
    assert resolve_loader(_WithData(), None, "train_dataloader") == [1, 2]
    assert resolve_loader(_Net(), None, "train_dataloader") is None


def test_a_dataset_in_place_of_a_loader_is_refused() -> None:
    dataset: Any = TensorDataset(torch.ones(3))
    with pytest.raises(UsageError) as caught:
        resolve_loader(_Net(), dataset, "train_dataloader")
    assert caught.value.what == "TensorDataset is a dataset, not a loader of batches"
    assert caught.value.where == "the argument in place of train_dataloader"
    assert caught.value.fix == "Write DataLoader(dataset, batch_size=32) from torch.utils.data."
