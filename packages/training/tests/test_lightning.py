"""LightningModules train unmodified."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import lightning
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from polyxla import UsageError, launch
from polyxla.replica.other_names import OTHER_NAMES
from polyxla_training import Trainer

pytestmark = pytest.mark.usefixtures("fake_replicas")


def _trainer(devices: int = 1, **options: Any) -> Trainer:
    return Trainer(**{"runtime": "fake", "devices": devices, "log_dir": None, "progress": False, **options})


def _data(count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, 3, generator=generator)
    return [(x, x @ torch.tensor([[1.0], [-2.0], [0.5]])) for x in inputs]


REPLICAS = pytest.mark.parametrize("devices", [1, 4], ids=["1-replica", "4-replicas"])


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


def test_a_lightning_module_without_any_data_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        _trainer().fit(_Lit())
    assert str(caught.value) == (
        "there is nothing to train on (from Trainer.fit). "
        "Pass the train loader, or write train_dataloader in the module."
    )


def test_each_name_of_lightnings_fabric_is_the_replicas_or_its_error_says_what_to_write() -> None:
    from lightning.fabric import Fabric

    names = {name for name in dir(Fabric) if not name.startswith("_")}
    (own,) = launch(lambda replica: set(dir(replica)), runtime="fake", devices=1)
    assert names <= own | set(OTHER_NAMES)
    assert not own & set(OTHER_NAMES)
