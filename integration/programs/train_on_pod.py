"""Trains one weight with a Trainer, and prints it as it is in the calling process afterwards."""

from __future__ import annotations

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
    module = Net()
    data = DataLoader(TensorDataset(torch.full((128,), 3.0)), batch_size=4)
    Trainer(max_epochs=1, log_dir=None, progress=False).fit(module, data)
    print(f"WEIGHT {module.weight.item():.2f}")
