"""Train a small network on two replicas with a Trainer."""

import torch
from torch import nn

from polyxla_training import Trainer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = Trainer(max_epochs=1, devices=2, log_dir=None)
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(32, 4), 4))  # type: ignore[arg-type]
