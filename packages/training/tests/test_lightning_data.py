"""Data modules and the hooks of a batch's transfer."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from polyxla import UsageError
from polyxla_training import Trainer

pytestmark = pytest.mark.usefixtures("fake_replicas")


def _trainer(devices: int = 1, **options: Any) -> Trainer:
    return Trainer(**{"runtime": "fake", "devices": devices, "log_dir": None, "progress": False, **options})


class _Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any) -> Any:
        self.log("seen", batch.sum(), on_epoch=True, reduce_fx="sum")
        return self.layer(batch).sum()

    def validation_step(self, batch: Any) -> None:
        self.log("val", batch.mean())

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class _Data(lightning.LightningDataModule):
    """Writes its calls into a file, which all replicas share."""

    def __init__(self, calls: Path) -> None:
        super().__init__()
        self.file = calls

    def _note(self, call: str) -> None:
        with self.file.open("a") as file:
            file.write(f"{call}\n")

    def prepare_data(self) -> None:
        self._note("prepare")

    def setup(self, stage: str) -> None:
        self._note(f"setup {stage}")
        self.records = torch.arange(16.0)[:, None]

    def train_dataloader(self) -> Any:
        return [self.records[i : i + 2] for i in range(0, 16, 2)]

    def val_dataloader(self) -> Any:
        return [self.records[:8], self.records[8:]] * 4

    test_dataloader = val_dataloader

    def teardown(self, stage: str) -> None:
        self._note(f"teardown {stage}")


def _calls(file: Path) -> list[str]:
    return file.read_text().splitlines()


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    return tmp_path / "calls"


@pytest.mark.parametrize("devices", [1, 4], ids=["1-replica", "4-replicas"])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_data_module_is_trained_on(devices: int, is_named: bool, calls: Path) -> None:
    data, trainer = _Data(calls), _trainer(devices)
    metrics = trainer.fit(_Net(), datamodule=data) if is_named else trainer.fit(_Net(), data)
    assert metrics == {"seen": 120.0, "val": 7.5}
    assert _calls(calls) == ["prepare", *["setup fit"] * devices, *["teardown fit"] * devices]
    assert data.trainer is None


def test_a_data_module_is_tested_on(calls: Path) -> None:
    assert _trainer(4).test(_Net(), _Data(calls)) == {"val": 7.5}
    assert _calls(calls) == ["prepare", *["setup test"] * 4, *["teardown test"] * 4]


def test_a_module_that_does_not_validate_leaves_a_data_modules_validation_out(calls: Path) -> None:
    class Trains(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        training_step = _Net.training_step
        configure_optimizers = _Net.configure_optimizers

    assert _trainer().fit(Trains(), _Data(calls)) == {"seen": 120.0}


def test_loaders_beside_a_data_module_are_refused(calls: Path) -> None:
    with pytest.raises(UsageError, match="loaders were passed beside _Data"):
        _trainer().fit(_Net(), [torch.ones(1, 1)], datamodule=_Data(calls))
    with pytest.raises(UsageError, match="str has no train_dataloader, val_dataloader, test_dataloader"):
        _trainer().fit(_Net(), datamodule="digits")


@pytest.mark.parametrize(
    ("numbering", "is_per_host", "expected"),
    [("0,1,4,5;2,3,6,7", True, 2), ("0,1,4,5;2,3,6,7", False, 1)],
    ids=["each-host", "one-host"],
)
def test_data_is_prepared_in_one_process_of_each_host(
    numbering: str, is_per_host: bool, expected: int, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DEVICES", "8")
    monkeypatch.setenv("FAKE_NUMBERING", numbering)
    data = _Data(calls)
    data.prepare_data_per_node = is_per_host
    _trainer(8).fit(_Net(), data)
    assert _calls(calls).count("prepare") == expected
    assert _calls(calls)[expected] == "setup fit", "before any replica is set up"


def test_replicas_meet_again_and_again_while_data_is_prepared(calls: Path, meetings: Any) -> None:
    class Slow(_Data):
        def prepare_data(self) -> None:
            meetings.wait(20)
            super().prepare_data()

    _trainer(2).fit(_Net(), Slow(calls))
    assert _calls(calls)[0] == "prepare"


def test_an_error_while_data_is_prepared_ends_all_replicas(calls: Path) -> None:
    class Fails(_Data):
        def prepare_data(self) -> None:
            raise ZeroDivisionError("no network")

        def on_exception(self, exception: BaseException) -> None:
            self._note(f"told of {exception}")

    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="no network"):
        _trainer(2).fit(_Net(), Fails(calls))
    assert "told of no network" in _calls(calls)
    assert threading.active_count() == threads


class _Wrapped:
    """A batch that only its owner knows how to move."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


threads: set[int] = set()


class _Transfers(_Data):
    def train_dataloader(self) -> Any:
        return [_Wrapped(batch) for batch in super().train_dataloader()]

    def val_dataloader(self) -> Any:
        return None

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        threads.add(threading.get_ident())
        return _Wrapped(batch.values * 10)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch.values.to(device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch + 1


def test_batches_of_any_type_are_moved_by_the_hooks(calls: Path) -> None:
    class Doubles(_Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            threads.add(threading.get_ident())

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            raise AssertionError("the data module's hook wins")

    assert _trainer().fit(Doubles(), _Transfers(calls)) == {"seen": 1216.0}
    assert len(threads) == 1, "in the thread of the loop, as in Lightning"


def test_a_modules_transfer_hooks_apply_to_all_its_loaders() -> None:
    class Shifts(_Net):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch + 100 * (1 + self.trainer.validating)

    metrics = _trainer().fit(Shifts(), [torch.ones(1, 1)], [torch.ones(1, 1)])
    assert metrics == {"seen": 101.0, "val": 201.0}


def test_the_state_of_a_data_module_is_in_the_checkpoint(calls: Path, tmp_path: Path) -> None:
    class Counts(_Data):
        loaded: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"read": 8}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict

    options: Any = {"checkpoint_dir": str(tmp_path / "run"), "resume": "auto"}
    first, second = Counts(calls), Counts(calls)
    _trainer(**options).fit(_Net(), first)
    _trainer(max_epochs=2, **options).fit(_Net(), second)
    assert (first.loaded, second.loaded) == (None, {"read": 8})


def test_layers_that_setup_makes_are_trained_and_a_caller_elsewhere_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer: Any = None

        def configure_model(self) -> None:
            self.layer = self.layer or torch.nn.Linear(1, 1)

        def training_step(self, batch: Any) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    alone, together = Late(), Late()
    _trainer(1).fit(alone, [torch.ones(2, 1)])
    # Replicas in threads train copies: the caller's module gets its layers when it gets the parameters.
    _trainer(2).fit(together, [torch.ones(2, 1)] * 2)
    assert together.layer.weight.shape == alone.layer.weight.shape

    class InSetup(Late):
        def setup(self, stage: str) -> None:
            self.layer = torch.nn.Linear(1, 1)
            self.before = self.layer.weight.item()

        def configure_model(self) -> None: ...

    in_setup = InSetup()
    _trainer(1).fit(in_setup, [torch.ones(2, 1)])
    assert in_setup.layer.weight.item() == pytest.approx(in_setup.before - 0.5 * 2)
    with pytest.raises(UsageError) as caught:
        _trainer(2).fit(InSetup(), [torch.ones(2, 1)] * 2)
    assert str(caught.value) == (
        "the replicas' modules and the caller's differ in layer.bias, layer.weight (from InSetup.setup). "
        "Make all layers in __init__ or in configure_model."
    )


def test_several_loaders_are_refused() -> None:
    loader: Any = DataLoader(TensorDataset(torch.ones(2, 1)))
    with pytest.raises(UsageError, match="there are 2 loaders"):
        _trainer().fit(_Net(), [loader, loader])
    with pytest.raises(UsageError, match="there are 2 loaders"):
        _trainer().fit(_Net(), [torch.ones(1, 1)], {"a": loader, "b": loader})
