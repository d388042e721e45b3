"""Train a small decoder, and print the loss of each step.

Argument: ``cpu``, ``replicas``, or ``spmd`` for an SPMD program whose batch is divided over the slices, and
whose weights are divided over the chips of a slice.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WORDS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 32, 32, 4, 16, 16, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mask = torch.ones(LENGTH, LENGTH, device=x.device).triu(1) * -1e9
        scores = (q @ k.transpose(-1, -2)) / (WIDTH // HEADS) ** 0.5 + mask
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        changed: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return changed


def decoder() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.Linear(WIDTH, WORDS))
    return model, torch.randint(WORDS, (BATCH, LENGTH + 1))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, tokens: torch.Tensor, finish: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        losses.append(finish(optimizer, loss))
    return losses


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.step()
    return loss.item()


def as_replica(index: int) -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    def finish(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
        xm.optimizer_step(optimizer)
        mean: Any = xm.all_reduce(xm.REDUCE_SUM, loss.detach(), scale=1.0 / xr.world_size())
        return float(mean.item())

    model, tokens = decoder()
    own = tokens.chunk(xr.world_size())[xr.global_ordinal()]
    device = torch_xla.device()
    losses = train(model.to(device), own.to(device), finish)
    if xr.global_ordinal() == 0:
        print(xr.world_size(), *losses)


def as_spmd() -> None:
    import torch_xla.distributed.spmd.xla_sharding as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    count = xr.global_runtime_device_count()
    slices = len({device["slice_index"] for device in xr.global_runtime_device_attributes()})
    mesh = xs.HybridMesh(
        ici_mesh_shape=(1, count // slices), dcn_mesh_shape=(slices, 1), axis_names=("data", "model")
    )
    model, tokens = decoder()
    model.to("xla")
    for weight in model.parameters():
        if weight.dim() == 2:
            xs.mark_sharding(weight, mesh, ("model", None))
    batch = tokens.to("xla")
    xs.mark_sharding(batch, mesh, ("data", None))
    print(count, *train(model, batch, step))


if __name__ == "__main__":
    if sys.argv[1] == "cpu":
        print(1, *train(*decoder(), step))
    elif sys.argv[1] == "spmd":
        as_spmd()
    else:
        import torch_xla

        torch_xla.launch(as_replica)
