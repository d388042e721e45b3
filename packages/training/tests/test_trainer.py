"""The Trainer on one and on four replicas: what is trained, what comes home, what is measured."""

from __future__ import annotations

import copy
import pickle
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import lightning
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from polyxla import UsageError
from polyxla.testing import PluginInstaller
from polyxla_training import Trainer

# Every replica reads every world_size-th batch, and how often a loader was divided is counted.
EVERY_NTH = """
from polyxla import hookimpl

divided = []

class EveryNth:
    def __init__(self, loader, world):
        self.loader, self.world = loader, world

    def __len__(self):
        return len(self.loader) // self.world.world_size

    def __iter__(self):
        for index, batch in enumerate(self.loader):
            if index % self.world.world_size == self.world.ordinal:
                yield batch

@hookimpl
def polyxla_shard_loader(loader, world):
    divided.append(world.ordinal)
    return EveryNth(loader, world)
"""


@pytest.fixture(autouse=True)
def _fake(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_plugin.hide_others(keep=["polyxla-training"])
    install_plugin.fake_runtime()
    install_plugin.listener("every-nth", EVERY_NTH)
    monkeypatch.setenv("FAKE_DEVICES", "4")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def _trainer(devices: int = 1, **options: Any) -> Trainer:
    return Trainer(**{"runtime": "fake", "devices": devices, "log_dir": None, "progress": False, **options})


def _data(count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, 3, generator=generator)
    return [(x, x @ torch.tensor([[1.0], [-2.0], [0.5]])) for x in inputs]


class _Net(torch.nn.Module):
    # Lent by the Trainer.
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


@REPLICAS
def test_it_trains_and_the_module_comes_home(devices: int) -> None:
    module, untrained = _Net(), _Net()
    trainer = _trainer(devices, max_epochs=10)
    assert trainer.fit(module, _data(8)) == {}
    losses = [one.training_step(_data(1, seed=1)[0]).item() for one in (module, untrained)]
    assert losses[0] < losses[1] / 10
    assert module.layer.weight.device.type == "cpu"
    assert type(module.layer.weight) is torch.nn.Parameter
    outcome = trainer.outcome
    assert outcome is not None
    assert (outcome.epochs, outcome.steps, outcome.world_size) == (10, 80 // devices, devices)
    assert (outcome.runtime, outcome.device) == ("fake", "FAKE")


def test_four_replicas_take_the_step_that_one_takes_on_all_their_batches() -> None:
    batches = _data(8)
    whole = [
        (torch.cat([x for x, _ in batches[i : i + 4]]), torch.cat([y for _, y in batches[i : i + 4]]))
        for i in (0, 4)
    ]
    alone, together = _Net(), _Net()
    _trainer(1, max_epochs=3).fit(alone, whole)
    _trainer(4, max_epochs=3).fit(together, batches)
    assert torch.allclose(alone.layer.weight, together.layer.weight, atol=1e-6)
    assert not torch.allclose(alone.layer.weight, _Net().layer.weight, atol=1e-2)


class _Tied(_Net):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encode = torch.nn.Linear(3, 3, bias=False)
        self.decode = torch.nn.Linear(3, 3, bias=False)
        self.decode.weight = self.encode.weight
        self.register_buffer("seen", torch.zeros(()))
        self.moves = 0

    def training_step(self, batch: Any) -> torch.Tensor:
        self.seen += 1
        return F.mse_loss(self.decode(self.encode(batch[0])), batch[0])

    def on_post_move_to_device(self) -> None:
        self.moves += 1


@REPLICAS
def test_tied_weights_and_buffers_come_home(devices: int) -> None:
    module = _Tied()
    weight = module.encode.weight
    before = weight.detach().clone()
    _trainer(devices).fit(module, _data(8))
    assert module.decode.weight is module.encode.weight is weight
    assert not torch.equal(weight, before)
    assert module.seen.item() == 8 // devices
    assert module.moves == (2 if devices == 1 else 0), "there and back, or not this one"


@REPLICAS
def test_nothing_lent_is_left(devices: int) -> None:
    module = _Validated()
    before = set(vars(module))
    _trainer(devices).fit(module, _data(4), [torch.ones(2)] * 4)
    assert set(vars(module)) == before


def test_what_was_lent_is_taken_back_after_an_error_too() -> None:
    class Fails(_Net):
        def training_step(self, batch: Any) -> torch.Tensor:
            raise ZeroDivisionError("in the step")

    module = Fails()
    before = set(vars(module))
    with pytest.raises(ZeroDivisionError) as caught:
        _trainer().fit(module, _data(1))
    assert set(vars(module)) == before
    assert caught.value.__notes__[0].startswith("raised in the replica with ordinal 0")


# Sizes 1, 3, 2, 2: a mean of means would be something else.
UNEVEN = [
    torch.tensor([8.0]),
    torch.tensor([0.0, 1.0, 2.0]),
    torch.tensor([4.0, 2.0]),
    torch.tensor([0.0, 7.0]),
]
MEAN, FIRST = 24 / 8, (8 + 0 * 3 + 4 * 2 + 0 * 2) / 8
SIZE = (1 + 9 + 4 + 4) / 8


@REPLICAS
def test_metrics_are_weighted_by_records_exactly(devices: int) -> None:
    trainer = _trainer(devices)
    expected = {"mean": MEAN, "first": FIRST, "size": SIZE}
    assert trainer.fit(_Validated(), _data(4), UNEVEN) == expected
    assert trainer.metrics == expected
    assert trainer.test(_Validated(), UNEVEN) == {"test_mean": MEAN}
    assert trainer.metrics == {"test_mean": MEAN}


def test_each_epoch_is_validated_without_gradients_and_in_eval_mode() -> None:
    seen: list[tuple[bool, bool]] = []

    class Watches(_Net):
        def training_step(self, batch: Any) -> torch.Tensor:
            seen.append((self.training, torch.is_grad_enabled()))
            return super().training_step(batch)

        def validation_step(self, batch: Any) -> None:
            seen.append((self.training, torch.is_grad_enabled()))

    _trainer(max_epochs=2).fit(Watches(), _data(1), _data(1))
    assert seen == [(True, True), (False, False)] * 2


def test_loaders_are_divided_once_each(install_plugin: PluginInstaller) -> None:
    _trainer(4, max_epochs=3).fit(_Validated(), _data(8), UNEVEN)
    import every_nth  # type: ignore[import-not-found]

    assert sorted(every_nth.divided) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_values_of_training_steps_may_be_meant_over_the_epoch() -> None:
    class Logs(_Net):
        def training_step(self, batch: Any) -> torch.Tensor:
            loss = super().training_step(batch)
            self.log("step_only", loss)
            self.log("ones", 1, on_epoch=True)
            return loss

    assert _trainer(4).fit(Logs(), _data(8)) == {"ones": 1.0}


@pytest.mark.parametrize(
    ("options", "steps", "epochs"),
    [
        pytest.param({"max_epochs": 2}, 8, 2, id="epochs"),
        pytest.param({"max_epochs": 9, "max_steps": 6}, 6, 1, id="within-an-epoch"),
        pytest.param({"max_epochs": 9, "max_steps": 4}, 4, 1, id="at-an-epochs-end"),
        pytest.param({"max_epochs": 1, "max_steps": 99}, 4, 1, id="more-than-there-are"),
    ],
)
def test_training_ends_at_the_limit(options: dict[str, Any], steps: int, epochs: int) -> None:
    trainer = _trainer(**options)
    trainer.fit(_Net(), _data(4))
    assert trainer.outcome is not None
    assert (trainer.outcome.steps, trainer.outcome.epochs) == (steps, epochs)


class _Scheduled(_Net):
    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        halving = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        tenth = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.1)
        return [self.optimizer], [{"scheduler": halving, "interval": "step"}, tenth]


def test_schedules_advance() -> None:
    module = _Scheduled()
    _trainer(max_epochs=2).fit(module, _data(3))
    assert module.optimizer.param_groups[0]["lr"] == pytest.approx(0.5**6 * 0.1**2)


class _Lit(lightning.LightningModule):
    """An ordinary LightningModule; nothing in it knows of polyxla."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(self.hparams["width"], 1)
        self.hooks: list[str] = []
        self.seen: list[tuple[int, int]] = []

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layer(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = F.mse_loss(self(inputs), targets)
        self.seen.append((self.current_epoch, self.trainer.global_step))
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        self.log_dict({"val_loss": F.mse_loss(self(inputs), targets), "val_index": float(batch_idx)})

    def on_fit_start(self) -> None:
        self.hooks.append("fit start")

    def on_train_epoch_start(self) -> None:
        self.hooks.append(f"train {self.current_epoch}")

    def on_validation_epoch_end(self) -> None:
        self.hooks.append(f"validated {self.current_epoch}")

    def on_train_end(self) -> None:
        self.hooks.append("train end")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class _LitWithData(_Lit):
    def train_dataloader(self) -> Any:
        return _data(4)

    def val_dataloader(self) -> Any:
        return _data(4, seed=1)


@REPLICAS
def test_a_lightning_module_trains_unmodified(devices: int) -> None:
    module = _Lit()
    before = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    metrics = _trainer(devices, max_epochs=8 * devices).fit(module, _data(8), _data(4, seed=1))
    assert set(metrics) == {"train_loss", "val_loss", "val_index"}
    assert metrics["val_loss"] < 0.5
    assert metrics["val_index"] == (1.5 if devices == 1 else 0)
    assert _trainer().test(_LitTested(), _data(2)) == {"index": 0.5}
    after = {name for name in vars(module) if not name.startswith("_")}
    assert after == set(before)
    assert module._trainer is None
    assert "log" not in vars(module)
    pickle.dumps(module)
    copy.deepcopy(module)


class _LitTested(_Lit):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("index", float(batch_idx))


def test_a_lightning_module_sees_its_epoch_and_step() -> None:
    module = _LitWithData()
    _trainer(max_epochs=2).fit(module)
    assert module.seen == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6), (1, 7)]
    assert module.hooks == ["fit start", "train 0", "validated 0", "train 1", "validated 1", "train end"]


@pytest.mark.parametrize("module", [_Net(), _Lit()], ids=["plain", "lightning"])
def test_without_any_data(module: Any) -> None:
    with pytest.raises(UsageError) as caught:
        _trainer().fit(module)
    assert str(caught.value) == (
        "there is nothing to train on (from Trainer.fit). "
        "Pass the train loader, or write train_dataloader in the module."
    )


def test_a_validation_loader_without_a_validation_step_is_refused_before_training() -> None:
    module = _Net()
    before = module.layer.weight.detach().clone()
    with pytest.raises(UsageError, match="_Net has no validation_step, but was given data for it"):
        _trainer().fit(module, _data(2), _data(2))
    assert torch.equal(module.layer.weight, before)


def test_an_empty_loader() -> None:
    with pytest.raises(UsageError) as caught:
        _trainer().fit(_Net(), [])
    assert str(caught.value) == (
        "the training loader gave no batch (from Trainer.fit). "
        "Check its dataset's length, and drop_last if the batch is larger than the dataset."
    )


class _Manual(_Net):
    automatic_optimization = False


class _Several(_Net):
    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers(), super().configure_optimizers()]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        pytest.param(
            _Manual(), "_Manual sets automatic_optimization=False, which Trainer does not support", id="manual"
        ),
        pytest.param(_Several(), "configure_optimizers returned 2 optimizers: ", id="several-optimizers"),
        pytest.param(
            torch.nn.Linear(1, 1), "Linear has no training_step and no configure_optimizers", id="no-step"
        ),
    ],
)
def test_what_cannot_be_trained(module: Any, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        _trainer().fit(module, _data(1))
    assert str(caught.value).startswith(text)
    assert "polyxla.launch" in caught.value.fix


def test_what_cannot_be_tested() -> None:
    with pytest.raises(UsageError, match="_Net has no test_step"):
        _trainer().test(_Net(), _data(1))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        pytest.param(
            {"strategy": "ddp"},
            "strategy='ddp' is not one of auto, debug (from Trainer). "
            "Leave it out: replicas, and how they start, come from devices= and the runtime.",
            id="strategy",
        ),
        *(
            pytest.param(
                {name: value},
                f"{name}={value!r} is not a positive integer (from Trainer). Write {name}=1.",
                id=f"{name}-{value}",
            )
            for name in ("max_epochs", "max_steps", "log_every_n_steps")
            for value in (0, -1, 1.5, True, "2")
        ),
    ],
)
def test_arguments_that_cannot_be_used(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Trainer(**options)
    assert str(caught.value) == text


def test_devices_are_those_of_launch() -> None:
    with pytest.raises(UsageError, match=r"devices=9 asks for 9 devices, but runtime fake has 4 here"):
        _trainer(9).fit(_Net(), _data(1))


@REPLICAS
def test_debug_prints_the_runtimes_report_once(devices: int, capsys: pytest.CaptureFixture[str]) -> None:
    _trainer(devices, strategy="debug").fit(_Net(), _data(4))
    assert capsys.readouterr().out == f"fake runtime: replica 0 of {devices}\n"
    _trainer(devices).fit(_Net(), _data(4))
    assert capsys.readouterr().out == ""


@pytest.fixture
def _double(install_plugin: PluginInstaller) -> None:
    code = """
from polyxla import hookimpl
from polyxla.contracts.precision import UnchangedPrecision

class Double(UnchangedPrecision):
    def convert_module(self, module):
        return module.double()

@hookimpl
def polyxla_precision(name):
    return Double() if name == "64" else None
"""
    install_plugin.listener("double", code)


@pytest.mark.usefixtures("_double")
@REPLICAS
def test_the_precision_policy_converts_the_module(devices: int) -> None:
    seen: list[torch.dtype] = []

    class Watches(_Net):
        def training_step(self, batch: Any) -> torch.Tensor:
            seen.append(self.layer.weight.dtype)
            return super().training_step([tensor.double() for tensor in batch])

    _trainer(devices, precision=64).fit(Watches(), _data(4))
    assert set(seen) == {torch.float64}


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@REPLICAS
def test_tensorboard_gets_steps_and_metrics(
    devices: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs"
    data = _data(4 * devices)
    _trainer(devices, max_epochs=2, log_dir=str(folder), log_every_n_steps=2).fit(_Validated(), data, UNEVEN)
    assert len(list(folder.glob("events.*"))) == 1, "one replica writes for all"
    scalars = _scalars(folder)
    assert [step for step, _ in scalars["loss"]] == [2, 4, 6, 8]
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


def test_the_default_folder_is_a_new_one_under_runs() -> None:
    _trainer(log_dir="auto", log_every_n_steps=1).fit(_Net(), _data(1))
    (folder,) = Path("runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-\d+", folder.name)
    assert set(_scalars(folder)) == {"loss"}


def test_without_a_folder_nothing_is_written() -> None:
    _trainer(log_dir=None).fit(_Validated(), _data(2), UNEVEN)
    _trainer(log_dir="auto").test(_Validated(), UNEVEN)
    assert list(Path().iterdir()) == []


@REPLICAS
def test_progress_counts_the_batches_of_one_replica(devices: int, capsys: pytest.CaptureFixture[str]) -> None:
    _trainer(devices, max_epochs=2, progress=True).fit(_Validated(), _data(4 * devices), UNEVEN)
    *said, summary = capsys.readouterr().err.splitlines()
    assert summary.startswith("polyxla: 8 steps in ")
    lines = [line.partition(" s: ")[0].rpartition(",")[0] for line in said]
    assert lines == [
        "polyxla: epoch 1/2, step 4",
        "polyxla: metrics, step 4",
        "polyxla: epoch 2/2, step 8",
        "polyxla: metrics, step 8",
    ]


class _Endless:
    """A loader that does not know its length."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from _data(1)


def test_a_loader_without_a_length_trains_to_the_step_limit(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = _trainer(max_steps=5, progress=True)
    trainer.fit(_Validated(), _Endless(), UNEVEN)
    assert trainer.outcome is not None
    assert trainer.outcome.steps == 5
    assert capsys.readouterr().err.startswith("polyxla: metrics, step 5, ")


def test_without_tensorboard_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.delitem(sys.modules, "polyxla_training.listeners.tensorboard", raising=False)
    with pytest.raises(UsageError) as caught:
        _trainer(log_dir="here").fit(_Net(), _data(1))
    assert str(caught.value) == (
        "TensorBoard is not installed (from Trainer(log_dir=...)). "
        "Install it: pip install 'polyxla-training[tensorboard]', or pass log_dir=None."
    )


@pytest.fixture
def _by_value() -> Iterator[None]:
    # Children cannot import a test module.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.usefixtures("_by_value")
def test_a_module_trained_in_another_process_comes_home() -> None:
    module = _Tied()
    before = module.encode.weight.detach().clone()
    trainer = _trainer(start_method="spawn")
    trainer.fit(module, _data(4))
    assert not torch.equal(module.encode.weight, before)
    assert module.decode.weight is module.encode.weight
    assert module.seen.item() == 4
    assert trainer.outcome is not None
    assert trainer.outcome.state is not None


class Sociable(lightning.LightningModule):
    """Uses what LightningModules commonly use of their trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 2)
        self.heard: list[str] = []

    def setup(self, stage: str) -> None:
        self.heard.append(f"setup {stage}")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.heard.append(f"batch {batch_idx}")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert self.logger is None
        assert isinstance(self.optimizers(), torch.optim.SGD)
        assert isinstance(self.lr_schedulers(), torch.optim.lr_scheduler.StepLR)
        self.print("rank", self.global_rank, "of", self.trainer.estimated_stepping_batches)
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None:
        self.log("epoch_seen", float(self.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def tiny(records: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(records, 4), torch.zeros(records).long()), batch_size=4)


def test_a_lightning_module_finds_what_it_expects_of_its_trainer(capfd: pytest.CaptureFixture[str]) -> None:
    module = Sociable()
    metrics = _trainer(max_epochs=2).fit(module, tiny())
    assert metrics == {"epoch_seen": 1.0}
    assert module.heard == ["setup fit", "batch 0", "batch 1", "batch 0", "batch 1"]
    assert capfd.readouterr().out.splitlines() == ["rank 0 of 4.0"] * 4
    assert module.training
    assert not {"optimizers", "lr_schedulers", "log"} & set(vars(module))


def test_a_lightning_module_without_a_test_step_is_refused() -> None:
    with pytest.raises(UsageError, match="Sociable has no test_step, but was given data for it"):
        _trainer().test(Sociable(), tiny())


class Counting:
    """Stands for a metric object: torchmetrics' has these methods too."""

    def __init__(self) -> None:
        self.right = self.seen = 0

    def compute(self) -> float:
        return self.right / self.seen

    def reset(self) -> None:
        self.right = self.seen = 0


class Measured(torch.nn.Module):
    def __init__(self, logged: Any) -> None:
        super().__init__()
        self.logged = logged

    def test_step(self, batch: Any) -> None:
        if isinstance(self.logged, Counting):
            self.logged.right += 1
            self.logged.seen += 2
        self.log("accuracy", self.logged)  # type: ignore[operator]


def test_a_metric_object_is_computed_and_reset() -> None:
    metric = Counting()
    module = Measured(metric)
    module.logged = metric
    assert _trainer().test(module, tiny()) == {"accuracy": 0.5}
    assert metric.seen == 0


def test_metric_objects_of_several_replicas_are_refused() -> None:
    with pytest.raises(UsageError, match="metric objects cannot be combined over 2 replicas"):
        _trainer(2).test(Measured(Counting()), tiny())


@pytest.mark.parametrize(
    ("value", "kind"),
    [(torch.ones(3), r"a tensor of shape \(3,\)"), ("high", "'high'")],
    ids=["tensor", "text"],
)
def test_what_cannot_be_logged_is_refused(value: Any, kind: str) -> None:
    with pytest.raises(UsageError, match=f"'accuracy' is logged as {kind}"):
        _trainer().test(Measured(value), tiny())


def test_gradients_are_reduced_once_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyxla.testing import fake

    reduced: list[int] = []
    reduce_gradients = fake._FakeReplication.reduce_gradients

    def counted(self: Any, optimizer: torch.optim.Optimizer) -> None:
        reduced.append(self.world.ordinal)
        reduce_gradients(self, optimizer)

    monkeypatch.setattr(fake._FakeReplication, "reduce_gradients", counted)
    trainer = _trainer(4, accumulate=2)
    trainer.fit(_Net(), _data(12))
    # Three batches for each replica: an update of two, and one of what is left.
    assert trainer.outcome is not None
    assert trainer.outcome.steps == 2
    assert sorted(reduced) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_what_is_left_of_an_epoch_counts_by_its_own_batches() -> None:
    halves, alone = _Net(), _Net()
    _trainer(accumulate=2).fit(halves, _data(3))
    batches = _data(3)
    pair = tuple(torch.cat([batches[0][part], batches[1][part]]) for part in (0, 1))
    _trainer().fit(alone, [pair, batches[2]])
    assert torch.allclose(halves.layer.weight, alone.layer.weight, atol=1e-6)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("accumulate", 0, "accumulate=0 is not a positive integer"),
        ("clip_norm", 0.0, "clip_norm=0.0 is not a positive number"),
        ("clip_value", "1", "clip_value='1' is not a positive number"),
        ("keep", 0, "keep=0 is not a positive integer"),
        ("profile_steps", (3, 2), "profile_steps=(3, 2) is not a first and a last step"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_at_once(option: str, value: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        _trainer(**{option: value})
    assert said in str(caught.value)


class _Asks(_Net):
    """Has steps with a mask."""

    masks: list[list[bool]]

    def training_step(self, batch: Any, valid: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.masks.append(valid.tolist())
        return torch.where(valid, (self.layer(batch[0]) - batch[1]).square()[:, 0], 0.0).sum()

    def validation_step(self, batch: Any, batch_idx: int, valid: torch.Tensor) -> None:
        # The padding of a batch may come out as anything.
        self.log("mean", torch.where(valid, batch[0][:, 0], torch.inf))


def test_a_step_with_a_mask_gets_batches_of_one_shape() -> None:
    module = _Asks()
    module.masks = []
    inputs = torch.arange(15.0).view(5, 3)
    loader = DataLoader(TensorDataset(inputs, torch.zeros(5, 1)), batch_size=3)
    metrics = _trainer().fit(module, loader, loader)
    assert module.masks == [[True, True, True], [True, True, False]]
    assert metrics == {"mean": inputs[:, 0].mean().item()}


def test_a_policy_that_refuses_a_module_is_told_by_its_name() -> None:
    class Refuses:
        name = "choosy"

        def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
            raise ValueError("keep_float32='haed' matches no module; did you mean 'head'?")

        def forward_context(self) -> Any: ...

        def describe(self) -> str:
            return ""

    with pytest.raises(UsageError, match=r"did you mean 'head'\? \(from precision choosy\)"):
        _trainer(precision=Refuses()).fit(_Net(), _data(1))
