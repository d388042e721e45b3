"""The Trainer on a real runtime: tied weights, exact metrics, no extra executions, LightningModules."""

from __future__ import annotations

from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from polyxla import Replica
from polyxla_testing import RuntimeUnderTest
from polyxla_training import Trainer


def blobs(records: int = 96) -> TensorDataset:
    torch.manual_seed(0)
    inputs = torch.randn(records, 16)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


class Tied(nn.Module):
    """An autoencoder whose decoder shares the encoder's weight, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(16, 2)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.head(self.decode(self.encode(inputs))), labels)

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        inputs, labels = batch
        right = self.head(self.decode(self.encode(inputs))).argmax(1) == labels
        self.log("accuracy", right.float().mean())  # type: ignore[operator]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Lit(lightning.LightningModule):
    """A module as a Lightning user writes it, without polyxla."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
        self.epochs_seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def on_train_epoch_end(self) -> None:
        self.epochs_seen.append(self.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def trainer(runtime: RuntimeUnderTest, **options: Any) -> Trainer:
    return Trainer(devices=1, runtime=runtime.name, log_dir=None, progress=False, **options)


def test_tied_weights_survive_both_moves(runtime: RuntimeUnderTest) -> None:
    module = Tied()
    before = module.encode.weight.detach().clone()
    metrics = trainer(runtime, max_epochs=3).fit(module, DataLoader(blobs(), 16), DataLoader(blobs(), 40))
    assert module.decode.weight is module.encode.weight
    assert not torch.equal(before, module.encode.weight)
    inputs, labels = blobs().tensors
    accuracy = (module.head(module.decode(module.encode(inputs))).argmax(1) == labels).float().mean().item()
    # 96 records in batches of 40: the last batch has 16, and is weighted as 16.
    assert abs(metrics["accuracy"] - accuracy) < 1e-6


def test_a_lightning_module_trains_unchanged(runtime: RuntimeUnderTest) -> None:
    module = Lit()
    metrics = trainer(runtime, max_epochs=8).fit(module, DataLoader(blobs(), 16), DataLoader(blobs(), 48))
    assert metrics["val_accuracy"] > 0.9
    assert metrics["train_loss"] < 0.3
    assert module.epochs_seen == list(range(8))
    assert module._trainer is None


@pytest.mark.torch_xla("torch_xla's metrics")
def test_a_step_is_one_execution_without_recompilation(runtime: RuntimeUnderTest) -> None:
    [(executions, compilations)] = runtime.launch(_count_steps, 20, devices=1)
    assert executions == 20
    assert compilations == 0


def _count_steps(replica: Replica, steps: int) -> tuple[int, int]:
    import torch_xla.debug.metrics as met

    module = nn.Linear(16, 2).to(replica.device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    batches = [torch.randn(8, 16) for _ in range(steps + 5)]
    for index, batch in enumerate(replica.loader(batches)):
        if index == 5:
            replica.sync(wait=True)
            before = _samples(met, "ExecuteTime"), _samples(met, "CompileTime")
        optimizer.zero_grad()
        module(batch).square().mean().backward()
        replica.step(optimizer)
    replica.sync(wait=True)
    return _samples(met, "ExecuteTime") - before[0], _samples(met, "CompileTime") - before[1]


def _samples(met: Any, name: str) -> int:
    data = met.metric_data(name)
    return data[0] if data else 0


@pytest.mark.torch_xla("torch_xla's report")
def test_the_debug_strategy_prints_the_runtimes_report(runtime: RuntimeUnderTest, capfd: Any) -> None:
    trainer(runtime, strategy="debug").fit(Tied(), DataLoader(blobs(), 32))
    assert "Metric: CompileTime" in capfd.readouterr().out
