"""Lightning's Callback objects: called in Lightning's order, saved with the state, or refused by name."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning
import pytest
import torch
from lightning.pytorch import callbacks as theirs
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from polyxla import UsageError
from polyxla_testing import PluginInstaller
from polyxla_training import Trainer
from polyxla_training.lightning.callbacks import ACCEPTED, CALLED, NOT_CALLED, check_callback

PROGRAMS = Path(__file__).parent / "programs"
HOOKS = {
    name
    for name, member in vars(theirs.Callback).items()
    if not name.startswith("_") and inspect.isfunction(member)
}


@pytest.fixture(autouse=True)
def _fake(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_plugin.hide_others(keep=["polyxla-training"])
    install_plugin.fake_runtime()
    install_plugin.listener("every-nth", (PROGRAMS / "every_nth.py").read_text())
    monkeypatch.setenv("FAKE_DEVICES", "4")
    monkeypatch.chdir(tmp_path)


def _trainer(devices: int = 1, **options: Any) -> Trainer:
    given = {"runtime": "fake", "devices": devices, "log_dir": None, "progress": False, "max_epochs": 2}
    return Trainer(**{**given, **options})


class _Net(lightning.LightningModule):
    """Keeps the calls of some of its hooks, and those of the callback."""

    calls: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls.append("training_step")
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.calls.append("validation_step")
        self.log("val_loss", F.mse_loss(self.layer(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.calls.append("test_step")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0])

    def setup(self, stage: str) -> None:
        self.calls.append("module " + getattr(stage, "value", stage))

    def teardown(self, stage: str) -> None:
        self.calls.append("module ends " + getattr(stage, "value", stage))

    def on_train_epoch_end(self) -> None:
        self.calls.append("module on_train_epoch_end")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls.append("module on_train_batch_start")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def _loader(self) -> DataLoader[Any]:
        inputs = torch.ones(4, 3)
        return DataLoader(TensorDataset(inputs, inputs[:, :1]), batch_size=2)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


def _recording() -> theirs.Callback:
    def recorded(name: str) -> Callable[..., Any]:
        def method(self: Any, *arguments: Any, **named: Any) -> Any:
            # Lightning passes the stage by name.
            _Net.calls.append(f"{name} {len(arguments) + len(named)}")
            return {} if name == "state_dict" else None

        return method

    made: theirs.Callback = type("Recording", (theirs.Callback,), {name: recorded(name) for name in HOOKS})()
    return made


def _in_lightning(run: str) -> list[str]:
    _Net.calls.clear()
    quiet: Any = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            num_sanity_val_steps=0,
            max_epochs=2,
            callbacks=_recording(),
            **quiet,
        )
        getattr(trainer, run)(_Net())
    return _Net.calls.copy()


def _in_polyxla(run: str) -> list[str]:
    _Net.calls.clear()
    getattr(_trainer(callbacks=[_recording()]), run)(_Net())
    return _Net.calls.copy()


def test_every_hook_of_the_installed_lightning_is_called_or_not_lightnings_to_call_here() -> None:
    assert HOOKS == CALLED | NOT_CALLED
    assert not CALLED & NOT_CALLED


@pytest.mark.parametrize("run", ["fit", "validate", "test", "predict"])
def test_hooks_are_called_in_lightnings_order_with_as_many_arguments(run: str) -> None:
    expected = _in_lightning(run)
    assert _in_polyxla(run) == expected
    assert len(expected) > 8


def test_an_error_is_reported_to_callbacks() -> None:
    seen: list[str] = []

    class Sees(theirs.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            seen.append(type(exception).__name__)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            assert trainer.optimizers == [optimizer]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _trainer(callbacks=[Sees()]).fit(_Net())
    assert seen == ["ZeroDivisionError"]


class _Counts(theirs.Callback):
    """Has a state, and adds to the checkpoint."""

    ends: ClassVar[list[tuple[int, int]]] = []

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert outputs["loss"].dim() == 0
        self.batches += 1

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.ends.append((trainer.global_rank, self.batches))

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = self.batches

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["mine"] > 0


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("own", [True, False], ids=["trainers", "modules"])
def test_the_state_of_a_callback_is_resumed_in_each_replica(devices: int, own: bool) -> None:
    class Configures(_Net):
        def configure_callbacks(self) -> Any:
            return [] if own else _Counts()

    _Counts.ends.clear()
    for epochs in (1, 3):
        given: Any = {"checkpoint_dir": "saved", "resume": "auto", "max_epochs": epochs}
        _trainer(devices, callbacks=[_Counts()] if own else [], **given).fit(Configures())
    per_epoch = 2 // devices
    expected = [(ordinal, epochs * per_epoch) for epochs in (1, 3) for ordinal in range(devices)]
    assert sorted(_Counts.ends) == sorted(expected)


def test_callbacks_of_the_module_replace_the_trainers_of_their_type() -> None:
    class Configures(_Net):
        def configure_callbacks(self) -> Any:
            return [_Counts()]

    _Counts.ends.clear()
    _trainer(callbacks=[_Counts()]).fit(Configures())
    assert _Counts.ends == [(0, 4)]


def test_a_callback_may_stop_training_and_works_with_a_plain_module() -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: torch.Tensor) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def stop(trainer: Any, pl_module: Any) -> None:
        assert isinstance(pl_module, Plain)
        trainer.should_stop = True

    trainer = _trainer(callbacks=[theirs.LambdaCallback(on_train_epoch_end=stop)], max_epochs=9)
    trainer.fit(Plain(), [torch.ones(1, 1)])
    assert trainer.outcome is not None
    assert trainer.outcome.epochs == 1


@pytest.mark.parametrize("name", sorted(set(theirs.__all__) - ACCEPTED))
def test_lightnings_own_callbacks_are_refused_with_what_to_write(name: str) -> None:
    theirs_own = getattr(theirs, name)
    callback: Any = object.__new__(type(f"My{name}", (theirs_own,), {}))
    with pytest.raises(UsageError) as caught:
        Trainer(callbacks=[callback])
    text = str(caught.value)
    assert text.startswith(f"My{name} needs Lightning's own Trainer (from Trainer(callbacks=...)). ")
    if name == "EarlyStopping":
        assert text.endswith("Write polyxla_training.EarlyStopping(monitor, mode, patience).")


def test_a_refused_callback_of_a_module_is_an_error_of_its_training() -> None:
    class Configures(_Net):
        def configure_callbacks(self) -> Any:
            return [theirs.EarlyStopping("val_loss")]

    with pytest.raises(UsageError, match="EarlyStopping needs Lightning's own Trainer"):
        _trainer().fit(Configures())


def test_a_hook_of_a_newer_lightning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs.Callback, "on_moon_phase", theirs.Callback.on_fit_start, raising=False)
    check_callback(theirs.Callback())
    newer = type("Newer", (theirs.Callback,), {"on_moon_phase": lambda _: None})()
    with pytest.raises(UsageError, match="Newer overrides on_moon_phase, which the Trainer would not call"):
        Trainer(callbacks=[newer])
