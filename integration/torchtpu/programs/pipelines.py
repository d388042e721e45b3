"""Trains a decoder, in stages on the ranks by each schedule of torch.distributed.pipelining, and on the CPU.

Before that, the ranks send to each other in every other way: starting them takes longer than both. The last
rank prints a line of JSON: the losses of each schedule, and those of the whole decoder on the CPU.
"""

import json
from collections.abc import Callable

import point_to_point
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn import functional as F

WORDS, WIDTH, BLOCKS, STEPS, BATCH, LENGTH, PARTS = 32, 16, 8, 4, 16, 8, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        scores = query @ key.transpose(1, 2) / WIDTH**0.5
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
        x = x + scores.masked_fill(future, -1e4).softmax(-1) @ value
        return x + self.down(torch.relu(self.up(x)))


def decoder() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, WORDS)]


def part(stage: int, stages: int) -> nn.Module:
    """Return one of equal parts of the decoder."""
    layers, blocks = decoder(), BLOCKS // stages
    first = layers[:1] if stage == 0 else []
    last = layers[-1:] if stage == stages - 1 else []
    return nn.Sequential(*first, *layers[1 + stage * blocks : 1 + (stage + 1) * blocks], *last)


def loss_of(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), words.flatten())


def train(modules: list[nn.Module], device: str, step: Callable[..., float | None]) -> list[float | None]:
    optimizer = torch.optim.SGD(
        (parameter for module in modules for parameter in module.parameters()), lr=0.5
    )
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        words = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=generator)
        optimizer.zero_grad()
        losses.append(step(words[:, :-1].to(device), words[:, 1:].to(device)))
        optimizer.step()
    return losses


def whole() -> list[float | None]:
    module = nn.Sequential(*decoder())

    def step(words: torch.Tensor, following: torch.Tensor) -> float:
        loss = loss_of(module(words), following)
        loss.backward()
        return loss.item()

    return train([module], "cpu", step)


def in_stages(kind: type) -> list[float | None]:
    rank, size = dist.get_rank(), dist.get_world_size()
    is_interleaved = kind is ScheduleInterleaved1F1B
    numbers = [rank, rank + size] if is_interleaved else [rank]
    count = size * len(numbers)
    modules = [part(number, count).to("tpu") for number in numbers]
    stages = [
        PipelineStage(module, number, count, torch.device("tpu"))
        for number, module in zip(numbers, modules, strict=True)
    ]
    schedule = kind(stages if is_interleaved else stages[0], PARTS, loss_fn=loss_of)

    def step(words: torch.Tensor, following: torch.Tensor) -> float | None:
        losses: list[torch.Tensor] = []
        given = (words,) if rank == 0 else ()
        schedule.step(*given, target=following if rank == size - 1 else None, losses=losses)
        return torch.stack(losses).mean().item() if losses else None

    return train(modules, "tpu", step)


dist.init_process_group("tpu_dist")
point_to_point.check()
found = {kind.__name__: in_stages(kind) for kind in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B)}
if dist.get_rank() == dist.get_world_size() - 1:
    print(json.dumps({**found, "whole": whole()}), flush=True)
dist.barrier()
dist.destroy_process_group()
