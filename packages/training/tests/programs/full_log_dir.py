"""Train with the logs on a disk that gets full at a step, then on the full disk. Argument: its directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from polyxla_training import CheckpointError, Trainer

disk = Path(sys.argv[1])


class Net(torch.nn.Module):
    log: Any

    def __init__(self, fill_at: int | None = None) -> None:
        super().__init__()
        self.layer, self.steps, self.fill_at = torch.nn.Linear(1, 1), 0, fill_at

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == self.fill_at:
            fill()
        loss: torch.Tensor = self.layer(batch).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fill() -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def train(log_dir: str, module: Net, **options: Any) -> None:
    trainer = Trainer(
        runtime="fake",
        devices=1,
        log_dir=str(disk / log_dir),
        loggers={"csv": {}, "tensorboard": {"flush_secs": 0}},
        log_every_n_steps=1,
        progress=False,
        **options,
    )
    trainer.fit(module, [torch.ones(1, 1)] * 300)
    print(f"{log_dir}: {module.steps} steps", flush=True)


train("mid", Net(fill_at=3))
train("full", Net())
try:
    train("checkpoints", Net(), checkpoint_dir=disk / "saved")
except CheckpointError as error:
    print(error.what, flush=True)
