"""Trains in each process of torchrun in a directory of its own: hosts without a shared file system."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from polyxla_training import Trainer


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return (self.weight - batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.25)


if __name__ == "__main__":
    directory = Path(sys.argv[1], f"host{os.environ['LOCAL_RANK']}")
    directory.mkdir(exist_ok=True)
    os.chdir(directory)
    data = DataLoader(TensorDataset(torch.full((16,), 3.0)), batch_size=4)
    trainer = Trainer(
        max_epochs=int(sys.argv[2]), checkpoint_dir="saved", resume="auto", log_dir=None, progress=False
    )
    trainer.fit(Net(), data)
    assert trainer.outcome is not None
    print(f"STEPS {trainer.outcome.steps}")
