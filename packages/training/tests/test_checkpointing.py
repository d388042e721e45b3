"""The Trainer saves its whole state, and resumes from it as if it had not stopped."""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from polyxla import UsageError
from polyxla_testing import PluginInstaller
from polyxla_testing.processes import wait_until
from polyxla_training import CheckpointError, CheckpointFolder, Trainer, load, save
from polyxla_training.checkpoint import folder
from polyxla_training.checkpoint.stop_signal import stop_file
from polyxla_training.listeners import checkpointing

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(autouse=True)
def _fake(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_plugin.hide_others(keep=["polyxla-training"])
    install_plugin.fake_runtime()
    monkeypatch.setenv("FAKE_DEVICES", "4")
    monkeypatch.chdir(tmp_path)


class _StopError(Exception):
    """Ends a run at a step, as a crash does."""


class _Net(torch.nn.Module):
    """Draws a random number in every step, so that a stream that was not resumed is noticed."""

    log: Any

    def __init__(self, crash_at: int | None = None, then: Callable[[], None] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)
        self.seen: list[list[float]] = []
        self.crash_at, self.then = crash_at, then

    def training_step(self, batch: Any) -> torch.Tensor:
        if len(self.seen) == self.crash_at:
            raise _StopError
        if self.then is not None and len(self.seen) == 3:
            self.then()
        inputs, targets = batch
        self.seen.append(targets[:, 0].tolist())
        loss = F.mse_loss(self.layer(inputs) + 0.1 * torch.rand(()), targets)
        self.log("epoch_loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _data() -> DataLoader[Any]:
    inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, torch.arange(20.0)[:, None]), batch_size=2)


def _fit(module: _Net, **options: Any) -> dict[str, float]:
    given = {"checkpoint_dir": "saved", "save_every_n_steps": 1, "resume": "auto", "seed": 4, **options}
    trainer = Trainer(runtime="fake", devices=1, log_dir=None, progress=False, max_epochs=2, **given)
    return trainer.fit(module, _data())


@pytest.mark.parametrize("crash_at", [0, 1, 7, 10, 13, 19])
def test_a_run_that_crashed_ends_as_if_it_had_not(crash_at: int) -> None:
    whole = _Net()
    expected = _fit(whole, checkpoint_dir=None, save_every_n_steps=None, resume=None)
    crashed, resumed = _Net(crash_at), _Net()
    with pytest.raises(_StopError):
        _fit(crashed)
    assert _fit(resumed) == expected, "the mean over the epoch counts both runs' batches"
    assert crashed.seen + resumed.seen == whole.seen
    assert torch.equal(resumed.layer.weight, whole.layer.weight)
    assert torch.equal(resumed.layer.bias, whole.layer.bias)


def test_accumulated_steps_resume_too() -> None:
    whole, crashed, resumed = _Net(), _Net(14), _Net()
    _fit(whole, checkpoint_dir=None, save_every_n_steps=None, resume=None, accumulate=4)
    with pytest.raises(_StopError):
        _fit(crashed, accumulate=4)
    _fit(resumed, accumulate=4)
    # The two batches of the update that was not made are read again.
    assert crashed.seen[:14] + resumed.seen == whole.seen
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


def test_a_metric_object_that_begins_anew_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    class Mean:
        values: ClassVar[list[float]] = []

        def compute(self) -> float:
            return sum(self.values) / len(self.values)

        def reset(self) -> None:
            self.values.clear()

    class Measures(_Net):
        def training_step(self, batch: Any) -> torch.Tensor:
            loss = super().training_step(batch)
            Mean.values.append(1.0)
            self.log("an_object", Mean(), on_step=False, on_epoch=True)
            return loss

    with pytest.raises(_StopError):
        _fit(Measures(3))
    _fit(Measures())
    said = "metric objects start from the beginning, and cover the rest of this epoch: ['an_object']"
    assert said in capsys.readouterr().err


def test_a_finished_training_is_not_repeated() -> None:
    _fit(_Net())
    again = _Net()
    _fit(again)
    assert again.seen == []
    assert not torch.equal(again.layer.weight, _Net().layer.weight), "the trained parameters are loaded"


def test_keep_leaves_the_newest_checkpoints_and_no_other_file() -> None:
    _fit(_Net(), keep=3)
    assert [entry.step for entry in CheckpointFolder("saved").entries()] == [18, 19, 20]
    assert len(list(Path("saved").iterdir())) == 3


def test_resuming_skips_a_damaged_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(_StopError):
        _fit(_Net(6))
    newest = CheckpointFolder("saved").latest()
    assert newest is not None
    newest.path.write_bytes(newest.path.read_bytes()[:-5])
    resumed = _Net()
    _fit(resumed)
    assert len(resumed.seen) == 15
    said = capsys.readouterr().err
    assert newest.path.name in said
    assert "resumed from saved/step-00000005.safetensors: epoch 0, step 5" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_on_a_signal_it_saves_and_then_ends(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []

    def interrupt() -> None:
        os.kill(os.getpid(), number)
        # The main thread handles it, and may wait for its turn during an epoch's steps.
        wait_until(stop_file("saved").exists, "the signal is handled")

    before = signal.signal(number, lambda received, _: ended.append(received))
    try:
        module = _Net(then=interrupt)
        _fit(module, save_every_n_steps=None)
    finally:
        signal.signal(number, before)
    assert ended == [number], "the signal is raised again once the state is safe"
    said = "training ends after this step, and saves it; press Ctrl-C again to end at once"
    assert (said in capfd.readouterr().err) is (number == signal.SIGINT)
    assert len(module.seen) < 20
    assert [entry.step for entry in CheckpointFolder("saved").entries()] == [len(module.seen)]
    assert not Path("saved/.stop").exists()
    whole, resumed = _Net(), _Net()
    _fit(whole, checkpoint_dir=None, save_every_n_steps=None, resume=None)
    _fit(resumed)
    assert module.seen + resumed.seen == whole.seen
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


def test_a_signal_ends_an_evaluation_at_once() -> None:
    ended = threading.Event()
    replicas: list[threading.Thread] = []

    class Validates(_Net):
        def validation_step(self, batch: Any) -> None:
            if not replicas:
                replicas.append(threading.current_thread())
                # The main thread handles it. A second signal could come after pytest.raises().
                os.kill(os.getpid(), signal.SIGINT)
                assert ended.wait(60), "the evaluation goes on"

    trainer = Trainer(runtime="fake", devices=1, log_dir=None, progress=False, checkpoint_dir="saved")
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.validate(Validates(), _data())
    finally:
        ended.set()
    replicas[0].join(60)
    assert not replicas[0].is_alive()


class _Slow(_Net):
    """Counts its steps by replica, each of which is a thread; in one of them, a signal comes."""

    made: ClassVar[list[int]] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        self.made.append(threading.get_ident())
        if len(self.made) == 100:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.002)
        inputs, targets = batch
        return F.mse_loss(self.layer(inputs), targets)


def test_on_sigterm_several_replicas_stop_at_the_same_step(
    install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin.listener("every-nth", (PROGRAMS / "every_nth.py").read_text())
    _Slow.made.clear()
    assert checkpointing.AGREE_EVERY_S == 2.0
    monkeypatch.setattr(checkpointing, "AGREE_EVERY_S", 0.05)
    # Only one replica is on the host that received the signal.
    files = iter([stop_file("saved"), *map(Path, ("one", "two", "three"))])
    monkeypatch.setattr(checkpointing, "stop_file", lambda _: next(files))
    ended: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    try:
        trainer = Trainer(
            runtime="fake", devices=4, log_dir=None, progress=False, checkpoint_dir="saved", max_epochs=1
        )
        trainer.fit(_Slow(), [(torch.ones(2, 3), torch.ones(2, 1))] * 1200)
    finally:
        signal.signal(signal.SIGTERM, before)
    steps = Counter(_Slow.made)
    assert ended == [signal.SIGTERM]
    assert len(steps) == 4
    assert len(set(steps.values())) == 1
    assert steps[_Slow.made[0]] < 300
    assert [entry.step for entry in CheckpointFolder("saved").entries()] == [steps[_Slow.made[0]]]


class _Clock(threading.local):
    """The time of one replica, whose steps the device makes after they are submitted."""

    now, queued, is_asked, steps = 0.0, 0, False, 0

    def __init__(self, submit_s: float, device_s: float) -> None:
        self.submit_s, self.device_s = submit_s, device_s

    def monotonic(self) -> float:
        return self.now

    def submit(self) -> None:
        """Submit a step, which waits if two are queued; an agreement has waited for the device."""
        if self.is_asked:
            self.now += self.queued * self.device_s
        self.queued = 0 if self.is_asked else self.queued
        self.now += self.submit_s + (self.device_s if self.queued == 2 else 0.0)
        self.queued, self.is_asked = min(self.queued + 1, 2), False
        self.steps += 1


@pytest.mark.parametrize(
    ("submit_s", "device_s", "steps"),
    [
        pytest.param(1 / 16, 0.0, [1, 5, 21, 53, 85, 117], id="sixteen-a-second"),
        pytest.param(0.02, 1.0, [1, 5, *range(7, 16)], id="that-the-device-makes-later"),
    ],
)
def test_replicas_agree_every_two_seconds_in_steps(
    submit_s: float,
    device_s: float,
    steps: list[int],
    install_plugin: PluginInstaller,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_plugin.listener("every-nth", (PROGRAMS / "every_nth.py").read_text())
    clock = _Clock(submit_s, device_s)
    agreed: list[int] = []

    class StopFile:
        def exists(self) -> bool:
            agreed.append(clock.steps)
            clock.is_asked = True
            return False

    class Timed(_Net):
        def training_step(self, batch: Any) -> torch.Tensor:
            clock.submit()
            return super().training_step(batch)

    monkeypatch.setattr(checkpointing, "time", clock)
    monkeypatch.setattr(checkpointing, "stop_file", lambda _: StopFile())
    options: Any = {"checkpoint_dir": "saved", "max_steps": steps[-1]}
    trainer = Trainer(runtime="fake", devices=2, log_dir=None, progress=False, **options)
    trainer.fit(Timed(), [(torch.ones(2, 3), torch.ones(2, 1))] * 400)
    assert sorted(agreed) == sorted(steps * 2)


@pytest.mark.parametrize("slow", [0, 1], ids=["before-the-next", "at-the-end"])
def test_replicas_meet_while_one_waits_for_its_write(
    slow: int, meetings: Any, install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin.listener("every-nth", (PROGRAMS / "every_nth.py").read_text())
    writes = itertools.count()

    def write(state: Any, path: Path) -> None:
        # More often than in a step and the end of an epoch.
        if next(writes) == slow:
            meetings.wait(40)
        save(state, path)

    monkeypatch.setattr(folder, "save", write)
    options: Any = {"checkpoint_dir": "saved", "save_every_n_steps": 1, "max_steps": 2}
    trainer = Trainer(runtime="fake", devices=2, log_dir=None, progress=False, **options)
    trainer.fit(_Net(), [(torch.ones(2, 3), torch.ones(2, 1))] * 40)
    assert [entry.step for entry in CheckpointFolder("saved").entries()] == [1, 2]


@pytest.fixture
def divided(install_plugin: PluginInstaller) -> None:
    """Divide the records among the replicas."""
    pytest.importorskip("polyxla_sampler")
    install_plugin.listener("shard", (PROGRAMS / "sampler_plugin.py").read_text())


class _Shared(_Net):
    """Collects the records of all replicas, and how many there were at each validation."""

    records: ClassVar[list[float]] = []
    validated: ClassVar[set[int]] = set()

    def training_step(self, batch: Any) -> torch.Tensor:
        self.records.extend(batch[1][:, 0].tolist())
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> None:
        self.validated.add(len(self.records))


def _fit_shared(devices: int, batch_size: int, **options: Any) -> None:
    given = {"checkpoint_dir": "saved", "save_every_n_steps": 1, "resume": "auto", **options}
    trainer = Trainer(runtime="fake", devices=devices, log_dir=None, progress=False, **given)
    dataset = _data().dataset
    trainer.fit(_Shared(), DataLoader(dataset, batch_size), DataLoader(dataset, 20))


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize(
    ("devices", "batch_size", "steps", "then"),
    [
        pytest.param(4, 2, 1, (2, 2), id="four-to-two"),
        pytest.param(4, 2, 1, (1, 2), id="four-to-one"),
        pytest.param(2, 2, 3, (4, 2), id="two-to-four"),
        pytest.param(1, 2, 1, (4, 2), id="one-to-four-after-one-batch"),
        pytest.param(1, 2, 6, (4, 2), id="one-to-four"),
        pytest.param(1, 2, 6, (1, 4), id="to-a-larger-batch"),
        pytest.param(1, 4, 3, (1, 2), id="to-a-smaller-batch"),
    ],
)
def test_a_run_of_another_size_trains_on_all_the_records_that_are_left(
    devices: int, batch_size: int, steps: int, then: tuple[int, int]
) -> None:
    _Shared.records.clear()
    _fit_shared(devices, batch_size, max_steps=steps)
    first = len(_Shared.records)
    assert first == devices * batch_size * steps
    _fit_shared(*then)
    # Records are repeated if they do not divide evenly.
    assert len(_Shared.records) == first + -(-(20 - first) // then[0]) * then[0]
    assert set(_Shared.records) == set(range(20))
    _fit_shared(*then, max_epochs=2)
    assert set(_Shared.records[-20:]) == set(range(20)), "the next epoch is whole"


@pytest.mark.usefixtures("divided")
def test_a_run_of_another_size_validates_where_an_epoch_of_its_own_would() -> None:
    _Shared.records.clear()
    _Shared.validated.clear()
    _fit_shared(2, 2, max_steps=2, val_check_interval=2)
    assert _Shared.validated == {8}
    _fit_shared(1, 2, val_check_interval=0.5)
    assert _Shared.validated == {8, 10, 20}


@pytest.mark.usefixtures("divided")
def test_a_limited_epoch_is_as_long_in_a_run_of_another_size() -> None:
    _Shared.records.clear()
    _fit_shared(1, 2, max_steps=4, limit_train_batches=0.8)
    _fit_shared(2, 2, limit_train_batches=0.8)
    # Of five batches of the second run's size, four.
    assert sorted(_Shared.records) == list(range(16))


def test_an_error_about_a_module_that_does_not_fit_names_the_file() -> None:
    _fit(_Net())

    class Other(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(1, 1)

    with pytest.raises(CheckpointError, match=r"missing: head\.weight, head\.bias .*step-00000020"):
        _fit(Other())


def test_parameters_that_a_hook_has_added_to_the_optimizer_resume() -> None:
    class Thaws(_Net):
        trainer: Any

        def __init__(self, crash_at: int | None = None) -> None:
            super().__init__(crash_at)
            self.body = torch.nn.Linear(3, 3)

        def training_step(self, batch: Any) -> torch.Tensor:
            return super().training_step((self.body(batch[0]), batch[1]))

        def on_train_epoch_start(self) -> None:
            if self.trainer.current_epoch == 1:
                self.optimizer.add_param_group({"params": list(self.body.parameters()), "lr": 0.01})

        def configure_optimizers(self) -> Any:
            self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=0.05)
            return [self.optimizer], [torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)]

    whole, crashed, resumed = Thaws(), Thaws(14), Thaws()
    _fit(whole, checkpoint_dir=None, save_every_n_steps=None, resume=None)
    with pytest.raises(_StopError):
        _fit(crashed)
    _fit(resumed)
    assert len(resumed.optimizer.param_groups) == 2
    assert not torch.equal(whole.body.weight, Thaws().body.weight)
    for parameter, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_an_optimizer_that_does_not_fit_is_refused() -> None:
    _fit(_Net())

    class Other(_Net):
        def configure_optimizers(self) -> Any:
            groups: list[Any] = [{"params": [self.layer.weight]}, {"params": [self.layer.bias]}]
            return torch.optim.AdamW(groups)

    with pytest.raises(CheckpointError, match="the optimizer or its schedules do not fit"):
        _fit(Other())


def test_a_file_that_no_trainer_wrote_is_refused() -> None:
    save({"weight": torch.ones(2)}, "other.safetensors")
    with pytest.raises(UsageError, match=r"other\.safetensors is not a checkpoint of a Trainer"):
        _fit(_Net(), resume="other.safetensors")


def test_a_missing_checkpoint_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors"):
        _fit(_Net(), resume="gone.safetensors")


def test_auto_needs_a_checkpoint_dir() -> None:
    with pytest.raises(UsageError, match="Write checkpoint_dir='checkpoints' too"):
        Trainer(resume="auto")


def test_a_checkpoint_is_a_dict_of_plain_values() -> None:
    _fit(_Net())
    state = load("saved/step-00000020.safetensors")
    assert (state["epoch"], state["step"], state["world_size"], state["seed"]) == (2, 20, 1, 4)
    assert set(state["module"]) == {"layer.weight", "layer.bias"}
    assert math.isclose(state["schedules"]["schedulers"][0]["_last_lr"][0], 0.05 * 0.7**6)
