"""Train a small decoder, or the example for digits, and print the loss of each step and the accuracy.

Arguments: ``decoder`` or ``digits``; ``cpu``, ``replicas``, or ``spmd`` for an SPMD program whose batches are
divided over the slices, and whose weights are divided over the chips of a slice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from polyxla_examples.digits import DigitsNet, datasets

WORDS, WIDTH, HEADS, LENGTH, BATCH = 32, 32, 4, 16, 16
IMAGES = 128
STEPS, EPOCHS = 5, 4
Batch = tuple[torch.Tensor, torch.Tensor]


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


@dataclass
class Task:
    """What to train, with the inputs and targets of each step, and those that are tested."""

    model: nn.Module
    batches: list[Batch]
    tested: Batch


def decoder() -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.Linear(WIDTH, WORDS))
    tokens = torch.randint(WORDS, (BATCH, LENGTH + 1))
    batch = tokens[:, :-1], tokens[:, 1:]
    return Task(model, [batch] * STEPS, batch)


def digits() -> Task:
    torch.manual_seed(0)
    train, test = datasets()
    (images, labels), (tested, answers) = train.tensors, test.tensors
    batches = [*zip(images.split(IMAGES), labels.split(IMAGES), strict=True)]
    # The last is smaller.
    return Task(DigitsNet(0.1), batches[:-1] * EPOCHS, (tested, answers))


TASKS: dict[str, Callable[[], Task]] = {"decoder": decoder, "digits": digits}


def train(model: nn.Module, batches: list[Batch], finish: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        losses.append(finish(optimizer, loss))
    return losses


def accuracy(model: nn.Module, tested: Batch) -> float:
    inputs, targets = tested
    share: float = (model(inputs).argmax(-1) == targets).float().mean().item()
    return share


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.step()
    return loss.item()


def as_replica(index: int, task: Task) -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    def finish(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
        xm.optimizer_step(optimizer)
        mean: Any = xm.all_reduce(xm.REDUCE_SUM, loss.detach(), scale=1.0 / xr.world_size())
        torch_xla.sync()
        return float(mean.item())

    def own(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(xr.world_size())[xr.global_ordinal()].to(device)

    device = torch_xla.device()
    model = task.model.to(device)
    losses = train(model, [(own(inputs), own(targets)) for inputs, targets in task.batches], finish)
    share = accuracy(model, (task.tested[0].to(device), task.tested[1].to(device)))
    if xr.global_ordinal() == 0:
        print(xr.world_size(), *losses, share)


def as_spmd(task: Task) -> None:
    import torch_xla
    import torch_xla.distributed.spmd.xla_sharding as xs
    import torch_xla.runtime as xr

    def finish(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
        optimizer.step()
        torch_xla.sync()
        return loss.item()

    def shard(tensor: torch.Tensor, axis: str) -> torch.Tensor:
        xs.mark_sharding(tensor, mesh, (axis, *[None] * (tensor.dim() - 1)))
        return tensor

    def parts(tensor: torch.Tensor) -> int:
        """Return how many different parts of the rows this host's devices hold."""
        return len({part.indices[0].start for part in xs.wrap_if_sharded(tensor).local_shards})

    xr.use_spmd()
    count = xr.global_runtime_device_count()
    slices = len({device["slice_index"] for device in xr.global_runtime_device_attributes()})
    chips = count // slices
    mesh = xs.HybridMesh(ici_mesh_shape=(1, chips), dcn_mesh_shape=(slices, 1), axis_names=("data", "model"))
    model = task.model.to("xla")
    for weight in model.parameters():
        if weight.dim() > 1:
            shard(weight, "model")
    batches = [
        (shard(inputs.to("xla"), "data"), shard(targets.to("xla"), "data"))
        for inputs, targets in task.batches
    ]
    # Each host has the chips of one slice: they share a part of the batch, and divide the weights.
    assert parts(batches[0][0]) == 1
    assert all(parts(weight) == chips for weight in model.parameters() if weight.dim() > 1)
    losses = train(model, batches, finish)
    print(count, *losses, accuracy(model, (task.tested[0].to("xla"), task.tested[1].to("xla"))))


if __name__ == "__main__":
    _, chosen, way = sys.argv
    task = TASKS[chosen]()
    if way == "cpu":
        print(1, *train(task.model, task.batches, step), accuracy(task.model, task.tested))
    elif way == "spmd":
        as_spmd(task)
    else:
        import torch_xla

        torch_xla.launch(as_replica, args=(task,))
