"""Train a module that a mesh divides, and resume if there is a checkpoint.

Arguments: the checkpoint directory, the mesh as JSON, the number of devices, that of epochs, and a file in
which ordinal 0 saves the whole state that training begins with.
"""

from __future__ import annotations

import json
import sys
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyxla_training
from polyxla_training.sharding.sharded_state import gathered


class Model(nn.Module):
    tp_plan: ClassVar = {"layers.*.0": "colwise", "layers.*.2": "rowwise"}

    def __init__(self, first_state: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(2)
        )
        # Fewer rows than replicas.
        self.head = nn.Linear(16, 3)
        self.first_state = first_state
        # manual_seed would open the TPU in the launching process.
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1, generator=generator)

    def training_step(self, batch: Any) -> torch.Tensor:
        x = self.embed(batch[0])
        for layer in self.layers:
            x = x + layer(x)
        # A random number in every step, so that a stream that was not resumed is noticed.
        noise = 0.01 * torch.rand((), device=x.device)
        return F.cross_entropy(self.head(x).flatten(0, 1) + noise, (batch[0] % 3).flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)
        return self.optimizer

    def on_train_start(self) -> None:
        state = {"module": dict(self.state_dict()), "optimizer": self.optimizer.state_dict()}
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        whole = gathered(state, keep=is_first)
        if is_first:
            polyxla_training.save(whole, self.first_state)


def main() -> None:
    directory, mesh, devices, epochs, first_state = sys.argv[1:]
    words = torch.randint(0, 32, (64, 8), generator=torch.Generator().manual_seed(1))
    trainer = polyxla_training.Trainer(
        runtime="torchtpu",
        strategy=json.loads(mesh),
        devices=int(devices),
        max_epochs=int(epochs),
        checkpoint_dir=directory,
        save_every_n_steps=1,
        keep=3,
        resume="auto",
        seed=0,
        log_dir=None,
        progress=False,
    )
    trainer.fit(Model(first_state), DataLoader(TensorDataset(words), 2))


if __name__ == "__main__":
    main()
