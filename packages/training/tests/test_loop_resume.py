"""A training that stops anywhere and resumes is, event for event and bit for bit, one that did not stop."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from polyxla import hookimpl
from polyxla_testing import PluginInstaller
from polyxla_training import CheckpointFolder, EarlyStopping, Trainer

Event = tuple[Any, ...]
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lrs.StepLR(o, 1, 0.5),
    "step-2": lambda o: lrs.StepLR(o, 2, 0.5),
    "multi-step": lambda o: lrs.MultiStepLR(o, [2, 5], 0.3),
    "exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "linear": lambda o: lrs.LinearLR(o, 0.2, total_iters=4),
    "constant": lambda o: lrs.ConstantLR(o, 0.5, total_iters=3),
    "polynomial": lambda o: lrs.PolynomialLR(o, 20, 2.0),
    "lambda": lambda o: lrs.LambdaLR(o, lambda count: 1 / (1 + count)),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda _: 0.8),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 5),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 2),
    "one-cycle": lambda o: lrs.OneCycleLR(o, 0.2, total_steps=200),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "sequential": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=2), lrs.CosineAnnealingLR(o, 6)], [2]
    ),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.5, 2), lrs.ExponentialLR(o, 0.9)]),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=0),
}


@dataclass(frozen=True)
class Plan:
    """A training, and where it stops.

    Attributes:
        schedule: a name in `SCHEDULES`.
        interval: ``step`` or ``epoch``.
        frequency: of the schedule's steps.
        monitored: the metric that the plateau, the checkpoints and the early stopping monitor.
        batches: number of an epoch's batches.
        has_length: whether the loader knows it.
        skip: batch at which every second epoch is cut short; None for never.
        patience: of the early stopping; None without it.
        options: the Trainer's.
        stops: each a way to stop and the number of the batch, counted over the whole training.
    """

    schedule: str
    interval: str
    frequency: int
    monitored: str
    batches: int
    has_length: bool
    skip: int | None
    patience: int | None
    options: dict[str, Any]
    stops: list[tuple[str, int]]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    batches, accumulate = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    has_length = draw(st.booleans())
    intervals = [interval for interval in range(accumulate, batches + 1) if interval % accumulate == 0]
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    options = {
        "max_epochs": draw(st.integers(1, 4)),
        "max_steps": draw(st.none() | st.integers(1, 20)),
        "accumulate": accumulate,
        "limit_train_batches": draw(st.none() | st.integers(1, 7)),
        "limit_val_batches": draw(st.sampled_from([None, 1])),
        "val_every_n_epochs": draw(st.integers(1, 2)),
        "save_every_n_steps": draw(st.none() | st.integers(1, 3)),
        "monitor": draw(st.sampled_from([None, "val_loss"])),
    }
    if options["limit_train_batches"] is None and intervals and has_length:
        options["val_check_interval"] = draw(st.none() | st.sampled_from(intervals))
    way = st.sampled_from(["max_steps", "should_stop", "stop", "crash"])
    return Plan(
        schedule,
        interval="epoch" if schedule == "plateau" else draw(st.sampled_from(["epoch", "step"])),
        frequency=draw(st.integers(1, 3)),
        # The first validation comes after two epochs, and a plateau needs its metric after one.
        monitored="val_loss" if options["val_every_n_epochs"] == 1 else "mean_loss",
        batches=batches,
        has_length=has_length,
        # An epoch that is cut short is not validated.
        skip=draw(st.none() | st.integers(0, 6)) if options["val_every_n_epochs"] == 1 else None,
        patience=draw(st.none() | st.integers(1, 3)),
        options=options,
        stops=draw(st.lists(st.tuples(way, st.integers(1, 14)), min_size=1, max_size=2)),
    )


class _CrashError(Exception):
    """Ends a run as a fault does."""


class _Net(lightning.LightningModule):
    """Draws random numbers and logs values wherever it is called, and keeps what it sees."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)
        self.drop = torch.nn.Dropout(0.3)
        self.plan = plan
        self.events: list[Event] = []

    def saw(self, name: str, *values: Any) -> None:
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.events.append((name, self.current_epoch, self.global_step, lr, *values))

    def on_train_start(self) -> None:
        torch.rand(3)
        self.log("starts", 1.0, reduce_fx="sum")

    def on_train_epoch_start(self) -> None:
        self.saw("epoch", float(torch.rand(())))
        self.log("epochs", 1.0, reduce_fx="sum")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        is_cut = self.plan.skip == batch_idx and self.current_epoch % 2 == 1
        return -1 if is_cut else None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.saw("train", batch_idx, batch[0].tolist())
        distance: torch.Tensor = self.layer(self.drop(batch[0])) - 1 + 0.1 * torch.rand(())
        loss = distance.square().mean()
        self.log("mean_loss", loss, on_epoch=True)
        self.log("quiet", batch_idx, on_step=False, on_epoch=True, logger=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.saw("validate", batch_idx, batch[0].tolist())
        self.log("val_loss", (self.layer(batch[0]) + torch.rand(())).square().mean())

    def on_validation_end(self) -> None:
        self.saw("validated", {name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def on_train_epoch_end(self) -> None:
        self.saw("epoch end")
        self.log("at_end", float(torch.rand(())))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = {
            "scheduler": SCHEDULES[self.plan.schedule](optimizer),
            "interval": self.plan.interval,
            "frequency": self.plan.frequency,
            "monitor": self.plan.monitored,
        }
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class _Stopper(lightning.Callback):
    """Counts the batches of the whole training, and stops it at one of them."""

    def __init__(self, way: str, at: int) -> None:
        self.way, self.at, self.batches = way, at, 0

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.batches += 1
        if self.batches == self.at and self.way == "should_stop":
            trainer.should_stop = True
        if self.batches == self.at and self.way == "crash":
            raise _CrashError


class _Listener:
    """Adds what listeners see to the module's events; stops at a step."""

    def __init__(self, net: _Net, way: str, at: int) -> None:
        self.net, self.way, self.at = net, way, at
        self.finished: int | None = None

    @hookimpl
    def polyxla_fit_started(self, fit: Any) -> None:
        self.fit = fit

    @hookimpl
    def polyxla_step_finished(self, step: int, logged: Any) -> None:
        self.net.saw("step", step, {name: float(value) for name, value in logged.items()})
        if self.way == "stop" and step == self.at:
            self.fit.stop("a test")

    @hookimpl
    def polyxla_metrics_ready(self, step: int, metrics: Any) -> None:
        self.net.saw("metrics", step, dict(metrics))

    @hookimpl
    def polyxla_epoch_finished(self, epoch: int) -> None:
        self.net.saw("epoch finished", epoch)

    @hookimpl
    def polyxla_fit_finished(self) -> None:
        self.finished = len(self.net.events)


class _Stream(IterableDataset[Any]):
    def __init__(self, records: int) -> None:
        self.records = records

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.records):
            yield (torch.tensor([number, 1.0 - number]) / 10,)


def _data(batches: int, has_length: bool) -> DataLoader[Any]:
    if not has_length:
        return DataLoader(_Stream(2 * batches), batch_size=2)
    values = torch.arange(4.0 * batches).reshape(-1, 2) / 10
    return DataLoader(TensorDataset(values), batch_size=2, shuffle=True)


@dataclass
class _Part:
    """What one run did.

    Attributes:
        events: those before the end of the training.
        has_crashed: whether it ended by an error.
        net: the module.
        result: what `fit` returned, and how it ended.
    """

    events: list[Event]
    has_crashed: bool
    net: _Net
    result: Any


def _run(plan: Plan, directory: str, way: str = "", at: int = 0) -> _Part:
    net = _Net(plan)
    listener = _Listener(net, way, at)
    options = dict(plan.options)
    if way == "max_steps":
        options["max_steps"] = min(at, options["max_steps"] or at)
    early = [EarlyStopping(plan.monitored, patience=plan.patience)] if plan.patience else []
    trainer = Trainer(
        runtime="fake",
        devices=1,
        log_dir=None,
        progress=False,
        seed=3,
        checkpoint_dir=directory,
        keep=None,
        resume="auto",
        callbacks=[_Stopper(way, at), *early, listener],
        **options,
    )
    try:
        trainer.fit(net, _data(plan.batches, plan.has_length), _data(2, has_length=True))
    except _CrashError:
        return _Part(net.events, True, net, None)
    assert trainer.outcome is not None
    ended = (trainer.metrics, trainer.outcome.epochs, trainer.outcome.steps, trainer.outcome.stopped)
    return _Part(net.events[: listener.finished], False, net, ended)


def _same(one: Any, other: Any) -> bool:
    """Return whether two states are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _difference(expected: list[Event], found: list[Event]) -> Any:
    return next((pair for pair in zip_longest(expected, found) if pair[0] != pair[1]), None)


def _check(plan: Plan) -> None:
    for directory in ("whole", "parts"):
        shutil.rmtree(directory, ignore_errors=True)
    whole = _run(plan, "whole")
    done: list[Event] = []
    has_crashed = False
    for way, at in [*plan.stops, ("", 0)]:
        part = _run(plan, "parts", way, at)
        # A part repeats what the part before, if it crashed, had not saved.
        first = range(len(done), -1 if has_crashed else len(done) - 1, -1)
        starts = [at for at in first if whole.events[at : at + len(part.events)] == part.events]
        assert starts, _difference(whole.events[len(done) :], part.events)
        done = [*done[: starts[0]], *part.events]
        # A part that has no step to make repeats nothing: the next one does.
        has_crashed = part.has_crashed or (has_crashed and not part.events)
    assert done == whole.events
    # A training that had ended has no new values of an evaluation after its end.
    skipped = 0 if part.events else 1
    assert part.result[skipped:] == whole.result[skipped:]
    ends = [CheckpointFolder(directory).load_latest() for directory in ("whole", "parts")]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0][0].step == ends[1][0].step
    assert _same(ends[0][1], ends[1][1])


@pytest.fixture
def _alone(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_plugin.hide_others(keep=["polyxla-training", "polyxla-sampler"])
    install_plugin.fake_runtime()
    monkeypatch.setenv("FAKE_DEVICES", "1")
    monkeypatch.chdir(tmp_path)


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=examples < 100,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


STOPPED_WITHIN = Plan(
    schedule="chained",
    interval="epoch",
    frequency=1,
    monitored="val_loss",
    batches=3,
    has_length=True,
    skip=None,
    patience=1,
    options={"max_epochs": 1, "max_steps": None, "save_every_n_steps": 1, "val_check_interval": 1},
    stops=[("max_steps", 3)],
)
"""A validation within an epoch ends the training, at a step that is already saved."""
STOPPED_AT_LAST_BATCH = replace(
    STOPPED_WITHIN, patience=None, options={"max_epochs": 2, "max_steps": 3}, stops=[("stop", 3)]
)
"""The end of the epoch is left to a run that has no steps to make."""


@pytest.mark.slow
@pytest.mark.usefixtures("_alone")
@_settings(25)
@given(plan=plans())
@example(plan=STOPPED_WITHIN)
@example(plan=STOPPED_AT_LAST_BATCH)
def test_a_training_in_parts_is_the_training_in_one(plan: Plan) -> None:
    _check(plan)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("_alone")
@_settings(500)
@given(plan=plans())
def test_many_trainings_in_parts_are_the_training_in_one(plan: Plan) -> None:
    _check(plan)
