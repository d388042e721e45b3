"""Callbacks with polyxla's hooks, early stopping, and the best checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from polyxla import Replica, UsageError, hookimpl
from polyxla_testing import PluginInstaller
from polyxla_training import CheckpointFolder, EarlyStopping, Trainer, load
from polyxla_training.observe import read_run
from polyxla_training.options import Fit

REPLICAS = pytest.mark.parametrize("devices", [1, 4], ids=["1-replica", "4-replicas"])
PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(autouse=True)
def _fake(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_plugin.hide_others(keep=["polyxla-training"])
    install_plugin.fake_runtime()
    install_plugin.listener("every-nth", (PROGRAMS / "every_nth.py").read_text())
    monkeypatch.setenv("FAKE_DEVICES", "4")
    monkeypatch.chdir(tmp_path)


class _Net(torch.nn.Module):
    """Its validations log what the test says, in the classes below."""

    log: Any
    trainer: Any

    def __init__(self, values: list[float], crash_at: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.values, self.crash_at = values, crash_at

    def training_step(self, batch: torch.Tensor) -> Any:
        if self.trainer.global_step == self.crash_at:
            raise ZeroDivisionError
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _EachEpoch(_Net):
    def validation_step(self, batch: torch.Tensor) -> None:
        # Each replica logs another value, and the mean of all is monitored.
        self.log("val_loss", self.values[self.trainer.current_epoch] + batch[0, 0])


VALIDATION = [torch.full((1, 1), float(number)) for number in (-3, -1, 1, 3)]


def _trainer(devices: int = 1, **options: Any) -> Trainer:
    given = {"runtime": "fake", "devices": devices, "log_dir": None, "progress": False, "max_epochs": 9}
    return Trainer(**{**given, **options})


def _fit(values: list[float], devices: int = 1, *, crash_at: int | None = None, **options: Any) -> Any:
    trainer = _trainer(devices, **options)
    trainer.fit(_EachEpoch(values, crash_at), [torch.ones(1, 1)] * 4, VALIDATION)
    return trainer.outcome


@REPLICAS
@pytest.mark.parametrize(
    ("values", "arguments", "epochs"),
    [
        ([5, 4, 3, 3, 3.5, 9], {"patience": 2}, 5),
        ([5, 4, 4, 3, 4, 4], {"patience": 2}, 6),
        ([5, 6], {"patience": 1}, 2),
        ([1, 2, 3, 2, 9], {"patience": 1, "mode": "max"}, 4),
        ([5, 4.5, 4.2], {"patience": 2, "min_delta": 1.0}, 3),
        ([5, float("nan")], {"patience": 9}, 2),
        ([9, 8, 7, 6, 5, 4, 3, 2, 1], {"patience": 1}, 9),
    ],
)
def test_early_stopping_ends_training_after_the_same_epoch_in_all_replicas(
    devices: int, values: list[float], arguments: Any, epochs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = _fit(values, devices, callbacks=[EarlyStopping("val_loss", **arguments)])
    assert outcome.epochs == epochs
    assert outcome.stopped.startswith("EarlyStopping: val_loss ") == (epochs < 9)
    assert ("training ended after step" in capsys.readouterr().err) == (epochs < 9)


def test_a_single_replicas_callback_is_the_callers_own_and_begins_anew_in_each_fit() -> None:
    stopping = EarlyStopping("val_loss", patience=2)
    for _ in range(2):
        assert _fit([5, 4, 6, 7], callbacks=[stopping]).epochs == 4
        assert (stopping.best, stopping.waited) == (4, 2)


@REPLICAS
@pytest.mark.parametrize("crash_at", [1, 2, 3])
def test_early_stopping_goes_on_counting_in_a_resumed_training(devices: int, crash_at: int) -> None:
    values, per_epoch = [5.0, 4, 6, 7, 3], 4 // devices

    def run(crash_at: int | None = None) -> Any:
        options: Any = {"checkpoint_dir": "saved", "resume": "auto"}
        stopping = EarlyStopping("val_loss", patience=2)
        return _fit(values, devices, crash_at=crash_at, callbacks=[stopping], **options)

    with pytest.raises(ZeroDivisionError):
        run(crash_at * per_epoch)
    assert run().epochs == 4
    again = run()
    assert (again.epochs, again.steps) == (4, 4 * per_epoch), "it had ended already"
    assert again.stopped == "EarlyStopping: val_loss has not been better than 4 in the last 2 evaluations"


@REPLICAS
def test_the_best_checkpoint_is_kept(devices: int) -> None:
    per_epoch = 4 // devices
    options: Any = {"checkpoint_dir": "saved", "keep": 1, "monitor": "val_loss"}
    _fit([5, 3, 4, 6], devices, **options, max_epochs=4)
    folder = CheckpointFolder("saved")
    names = [f"step-{2 * per_epoch:08d}-best.safetensors", f"step-{4 * per_epoch:08d}.safetensors"]
    assert [entry.path.name for entry in folder.entries()] == names
    best = folder.best()
    assert best is not None
    assert (best.step, load(best.path)["epoch"]) == (2 * per_epoch, 2)
    latest = folder.latest()
    assert latest is not None
    assert not latest.is_best


def test_a_resumed_training_remembers_the_best() -> None:
    options: Any = {"checkpoint_dir": "saved", "monitor": "score", "mode": "max", "resume": "auto"}

    class Scored(_EachEpoch):
        def validation_step(self, batch: torch.Tensor) -> None:
            self.log("score", self.values[self.trainer.current_epoch])

    for crash_at, epochs in ((12, 3), (None, 5)):
        trainer = _trainer(max_epochs=5, **options)
        module = Scored([1, 7, 2, 3, 4], crash_at)
        if crash_at:
            with pytest.raises(ZeroDivisionError):
                trainer.fit(module, [torch.ones(1, 1)] * 4, VALIDATION)
        else:
            trainer.fit(module, [torch.ones(1, 1)] * 4, VALIDATION)
        best = CheckpointFolder("saved").best()
        assert best is not None
        assert load(best.path)["epoch"] == 2, epochs


class _Within(_Net):
    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("val_loss", self.values[self.trainer.global_step // 2 - 1])


def test_a_validation_within_an_epoch_may_be_the_best_and_may_stop() -> None:
    options: Any = {"checkpoint_dir": "saved", "monitor": "val_loss", "val_check_interval": 2, "keep": 1}
    trainer = _trainer(callbacks=[EarlyStopping("val_loss", patience=2)], **options)
    trainer.fit(_Within([5, 4, 3, 9, 9]), [torch.ones(1, 1)] * 4, VALIDATION)
    best = CheckpointFolder("saved").best()
    assert best is not None
    assert best.step == 6
    state = load(best.path)
    assert (state["epoch"], state["data"]["batches"]) == (1, 2)
    assert trainer.outcome is not None
    assert (trainer.outcome.epochs, trainer.outcome.steps) == (2, 10)


@REPLICAS
@pytest.mark.parametrize("options", [{}, {"rank_zero_only": True}], ids=["by-all", "by-the-first"])
def test_a_metric_that_is_hidden_from_logs_is_monitored(
    devices: int, options: dict[str, bool], capsys: pytest.CaptureFixture[str]
) -> None:
    class Hidden(_Net):
        def validation_step(self, batch: torch.Tensor) -> None:
            self.log("val_loss", self.values[self.trainer.global_step - 1], logger=False, **options)

    trainer = _trainer(
        devices,
        callbacks=[EarlyStopping("val_loss", patience=2)],
        checkpoint_dir="saved",
        monitor="val_loss",
        val_check_interval=1,
        log_dir="logs",
        loggers=["csv"],
        progress=True,
    )
    trainer.fit(Hidden([5, 4, 3, 9, 9]), [torch.ones(1, 1)] * 2 * devices, VALIDATION)
    best = CheckpointFolder("saved").best()
    assert best is not None
    assert best.step == 3
    assert trainer.outcome is not None
    assert trainer.outcome.stopped.startswith("EarlyStopping: val_loss has not been better than 3 ")
    assert "val_loss" not in Path("logs/metrics.csv").read_text()
    said = capsys.readouterr().err
    assert "val_loss" not in said.replace(trainer.outcome.stopped, "")
    assert "metrics, step" not in said
    assert "metrics" not in {event["event"] for event in read_run(Path("logs"))}


@pytest.mark.parametrize("kind", ["callback", "checkpoint"])
def test_a_metric_that_is_not_logged_is_an_error_after_the_first_epoch_which_is_saved(kind: str) -> None:
    options: Any = {"checkpoint_dir": "saved", "val_every_n_epochs": 2}
    options |= {"monitor": "loss"} if kind == "checkpoint" else {"callbacks": [EarlyStopping("loss")]}
    where = "Trainer(monitor=...)" if kind == "checkpoint" else "EarlyStopping"
    with pytest.raises(UsageError) as caught:
        _fit([1.0] * 9, **options)
    assert str(caught.value) == (
        f"monitor='loss' was not logged, by epoch 2 (from {where}). "
        "Log it: self.log('loss', ...) in validation_step, or with on_epoch=True."
    )
    latest = CheckpointFolder("saved").latest()
    assert latest is not None
    assert latest.step == (8 if kind == "checkpoint" else 4)


class Recorder:
    """Counts steps in its state, and events of all replicas in the class."""

    events: ClassVar[list[tuple[int, str]]] = []

    def __init__(self, state_key: str = "recorder") -> None:
        self.steps, self.state_key = 0, state_key

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.steps = state["steps"]

    @hookimpl
    def polyxla_fit_started(self, replica: Replica, fit: Fit) -> None:
        assert fit.optimizer.param_groups[0]["lr"] == 0.1
        self.events.append((replica.ordinal, f"started at {self.steps}"))

    @hookimpl
    def polyxla_step_finished(self, step: int) -> None:
        self.steps += 1
        assert self.steps == step

    @hookimpl
    def polyxla_replica_stopped(self, replica: Replica) -> None:
        self.events.append((replica.ordinal, f"stopped at {self.steps}"))


@REPLICAS
def test_a_callback_hears_the_events_of_each_replica_and_its_state_is_saved(devices: int) -> None:
    Recorder.events.clear()
    per_epoch = 4 // devices
    options: dict[str, Any] = {"checkpoint_dir": "saved", "resume": "auto", "save_every_n_steps": 1}
    for epochs in (1, 3):
        _fit([1.0] * 9, devices, callbacks=[Recorder()], max_epochs=epochs, **options)
    expected = ["started at 0", f"stopped at {per_epoch}", f"started at {per_epoch}"]
    expected.append(f"stopped at {3 * per_epoch}")
    for ordinal in range(devices):
        assert [event for where, event in Recorder.events if where == ordinal] == expected


def test_states_of_callbacks_that_are_gone_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    options: Any = {"checkpoint_dir": "saved", "resume": "auto"}
    _fit([1.0] * 9, callbacks=[Recorder()], max_epochs=1, **options)
    _fit([1.0] * 9, callbacks=[], max_epochs=2, **options)
    assert "the checkpoint has states of callbacks that are not here: recorder" in capsys.readouterr().err


def test_two_callbacks_of_one_name_are_refused_before_training() -> None:
    with pytest.raises(UsageError, match="two callbacks have the name 'recorder' in checkpoints"):
        _fit([1.0] * 9, callbacks=[Recorder(), Recorder()])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"callbacks": [object()]}, "has no hook implementations"),
        ({"callbacks": [Recorder]}, "has no hook implementations"),
        ({"callbacks": Recorder()}, "is not a list"),
        ({"monitor": "loss"}, "monitor='loss' chooses the best checkpoint, and checkpoint_dir is not set"),
        ({"save_every_n_steps": 5}, "save_every_n_steps=5 is the interval of checkpoints, and checkpoint"),
        ({"keep": 3}, "keep=3 is the number of checkpoints to keep, and checkpoint_dir is not set"),
        ({"keep": None}, "keep=None is the number of checkpoints to keep, and checkpoint_dir is not set"),
        ({"mode": "least"}, "mode='least' is neither min nor max"),
    ],
)
def test_an_invalid_option_is_refused_at_once(options: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Trainer(**options)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"patience": 0}, "patience=0 is not a positive integer"),
        ({"mode": "up"}, "mode='up' is neither min nor max"),
        ({"min_delta": -1}, "min_delta=-1 is negative"),
    ],
)
def test_an_invalid_early_stopping_is_refused(arguments: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        EarlyStopping("loss", **arguments)
    assert said in str(caught.value)
