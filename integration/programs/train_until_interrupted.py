"""Train without an end. Each replica creates a file in DIRECTORY at its first step, and one at its end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from polyxla.plugin import failures
from polyxla_training import Trainer

DIRECTORY = Path(sys.argv[1])


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(1)


class Net(torch.nn.Module):
    trainer: Any

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        (DIRECTORY / str(self.trainer.global_rank)).touch()
        loss: torch.Tensor = self.layer(batch).square().mean()
        return loss

    def on_train_end(self) -> None:
        if "RANK" in os.environ:
            # Longer than a replica has that saves nothing.
            time.sleep(failures.INTERRUPT_GRACE_S + 1)
        (DIRECTORY / f"ended-{self.trainer.global_rank}").touch()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    options: dict[str, Any] = {"log_dir": None, "progress": False, "checkpoint_dir": DIRECTORY / "saved"}
    Trainer(**options).fit(Net(), DataLoader(Endless(), batch_size=2))
