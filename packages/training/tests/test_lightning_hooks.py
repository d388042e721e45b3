"""Every hook of the installed Lightning is called as Lightning calls it, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from polyxla import UsageError
from polyxla_training import Trainer
from polyxla_training.lightning import hooks

pytestmark = pytest.mark.usefixtures("fake_replicas")

BATCHES = 4


def _trainer(devices: int = 1, **options: Any) -> Trainer:
    return Trainer(**{"runtime": "fake", "devices": devices, "log_dir": None, "progress": False, **options})


def _methods(*classes: type) -> set[str]:
    """Return the public methods that the classes define."""
    return {
        name
        for base in classes
        for name, member in vars(base).items()
        if not name.startswith("_") and not isinstance(member, property) and callable(getattr(base, name))
    }


HOOKS = _methods(ModelHooks, DataHooks, CheckpointHooks, lightning.LightningModule)
DATA_HOOKS = _methods(DataHooks, lightning.LightningDataModule)


CALLED = hooks.CALLED - {"configure_sharded_model"}
"""Lightning refuses a module that overrides both this old hook and ``configure_model``."""


class _Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)
        self.calls: list[str] = []

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layer(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": F.mse_loss(self(batch[0]), batch[1]), "index": batch_idx}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", F.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(2 * BATCHES, 3, generator=generator)
        return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=2)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


def _recording(names: Iterable[str], base: type[_Net] = _Net) -> _Net:
    """Return a module that overrides all these methods, and keeps the calls in `calls`."""

    def recorded(name: str) -> Callable[..., Any]:
        def method(self: Any, *arguments: Any, **named: Any) -> Any:
            self.calls.append(name)
            return getattr(super(made, self), name)(*arguments, **named)

        return method

    made: type[_Net] = type("Recording", (base,), {name: recorded(name) for name in sorted(names)})
    return made()


def _in_lightning(module: _Net, run: str = "fit", **options: Any) -> list[str]:
    quiet: Any = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, num_sanity_val_steps=0, **{"max_epochs": 2, **quiet, **options}
        )
        getattr(trainer, run)(module)
    return module.calls


def _in_polyxla(module: _Net, run: str = "fit", **options: Any) -> list[str]:
    getattr(_trainer(**{"max_epochs": 2, **options}), run)(module)
    return module.calls


def _without_loaders(calls: list[str]) -> list[str]:
    # The loaders are made before configure_optimizers, which may ask how many steps there are.
    return [name for name in calls if not name.endswith("_dataloader")]


def test_every_hook_of_the_installed_lightning_is_called_refused_or_not_lightnings_to_call() -> None:
    sets = (hooks.CALLED, set(hooks.REFUSED), hooks.NOT_CALLED)
    assert set().union(*sets) == HOOKS
    assert sum(map(len, sets)) == len(HOOKS), "each is in one set"
    assert hooks.DATA_CALLED | hooks.DATA_NOT_CALLED == DATA_HOOKS
    assert not hooks.DATA_CALLED & hooks.DATA_NOT_CALLED


def test_lightning_does_not_call_what_is_said_to_be_not_called() -> None:
    names = hooks.NOT_CALLED - {"load_from_checkpoint"}
    module = _recording(names)
    assert _in_lightning(module) == []
    for run in ("validate", "test", "predict"):
        assert _in_lightning(module, run) == []


def test_all_hooks_are_called(tmp_path: Path) -> None:
    module = _recording(CALLED)
    options: Any = {"checkpoint_dir": str(tmp_path), "resume": "auto"}
    called = set(_in_polyxla(module, max_epochs=1, **options))
    called |= set(_in_polyxla(_recording(CALLED), **options))
    called |= {name for run in ("test", "predict") for name in _in_polyxla(_recording(CALLED), run)}
    assert called == CALLED


@pytest.mark.parametrize("accumulate", [1, 2])
def test_fit_calls_the_hooks_in_lightnings_order(accumulate: int) -> None:
    expected = _in_lightning(_recording(CALLED), accumulate_grad_batches=accumulate)
    found = _in_polyxla(_recording(CALLED), accumulate=accumulate)
    assert _without_loaders(found) == _without_loaders(expected)
    assert found.count("training_step") == 2 * BATCHES
    assert {name for name in found if name.endswith("_dataloader")} == {"train_dataloader", "val_dataloader"}


@pytest.mark.parametrize(
    ("run", "hook"),
    [
        ("validate", "on_validation_batch_end"),
        ("test", "on_test_batch_end"),
        ("predict", "on_predict_batch_end"),
    ],
)
def test_an_evaluation_calls_the_hooks_in_lightnings_order(run: str, hook: str) -> None:
    expected = _in_lightning(_recording(CALLED), run)
    assert _in_polyxla(_recording(CALLED), run) == expected
    assert expected.count(hook) == BATCHES


def test_the_old_hook_for_making_layers_is_called_as_well() -> None:
    names = ["setup", "configure_sharded_model", "configure_optimizers"]
    expected = _in_lightning(_recording(names))
    assert _in_polyxla(_recording(names)) == expected == names


class _Skipping(_Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 2 else None


class _Stopping(_Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            self.trainer.should_stop = True


class _StoppingAfterValidation(_Net):
    def on_validation_end(self) -> None:
        self.trainer.should_stop = True


@pytest.mark.parametrize("base", [_Stopping, _StoppingAfterValidation])
def test_should_stop_ends_training_where_lightning_does(base: type[_Net]) -> None:
    expected = _without_loaders(_in_lightning(_recording(CALLED, base)))
    assert _without_loaders(_in_polyxla(_recording(CALLED, base))) == expected
    assert expected.count("training_step") == (2 if base is _Stopping else BATCHES)


def test_minus_one_skips_the_rest_of_the_epoch_as_in_lightning() -> None:
    # A skipped batch makes no update, and advances no schedule here.
    names = CALLED - {"lr_scheduler_step"}
    expected = _without_loaders(_in_lightning(_recording(names, _Skipping)))
    assert _without_loaders(_in_polyxla(_recording(names, _Skipping))) == expected
    assert (expected.count("training_step"), expected.count("on_train_epoch_end")) == (2 + BATCHES, 2)
    assert expected.count("on_validation_start") == 1, "an epoch that was cut short is not validated"


@pytest.mark.parametrize("name", sorted(hooks.REFUSED))
def test_an_override_that_the_trainer_would_replace_is_refused(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        _trainer().fit(_recording([name]))
    assert str(caught.value) == (
        f"Recording overrides {name}, which the Trainer would not call (from Recording.{name}). "
        f"Remove it: the Trainer replaces it; give your method another name, and call self.{name} in it."
    )


def test_a_hook_of_a_newer_lightning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelHooks, "on_moon_phase", ModelHooks.on_fit_start, raising=False)
    with pytest.raises(UsageError, match="Recording overrides on_moon_phase, which the Trainer would not"):
        _trainer().fit(_recording(["on_moon_phase"]))
    _trainer().fit(_Net())


def test_a_step_that_reads_its_batches_itself_is_refused() -> None:
    class Reads(_Net):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return None

    with pytest.raises(
        UsageError, match="training_step takes dataloader_iter, and the Trainer passes batches"
    ):
        _trainer().fit(Reads())


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_hooks_of_a_plain_module_are_its_own(stage: str) -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch: Any) -> Any:
            return self.layer(batch).sum()

        def test_step(self, batch: Any) -> None: ...

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def backward(self) -> None:
            raise AssertionError("it takes no loss")

        setup = prepare_data = teardown = on_train_batch_start = optimizer_step = backward

    getattr(_trainer(), stage)(Plain(), [torch.ones(2, 3)])
