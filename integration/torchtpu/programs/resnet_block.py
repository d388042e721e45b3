"""A convolutional network with one residual block, trained on made-up images: one device or DDP.

Run it by python or torchrun: resnet_block.py [STRATEGY [DEVICE]]
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

STRATEGY = sys.argv[1] if len(sys.argv) > 1 else "none"
DEVICE = sys.argv[2] if len(sys.argv) > 2 else "tpu"
BATCH, STEPS = 32, 20


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("tpu_dist" if DEVICE == "tpu" else "gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.MaxPool2d(2),
        Residual(16),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).to(DEVICE)
    if STRATEGY == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    compute = torch.compile(model) if STRATEGY == "compile" else model
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    random = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH, 3, 16, 16, generator=random)
    labels = torch.randint(0, 10, (BATCH,), generator=random)
    mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    for _ in range(STEPS):
        loss = F.cross_entropy(compute(images[mine].to(DEVICE)), labels[mine].to(DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean)
            mean /= world
        if rank == 0:
            print("loss", mean.item(), flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
