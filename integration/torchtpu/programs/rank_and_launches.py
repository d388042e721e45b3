"""One replica of `polyxla run --each`: its own group, a launch that joins. With an argument, rank 1 fails."""

from __future__ import annotations

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import polyxla
from polyxla import Replica


def gather(replica: Replica) -> list[int]:
    """Gather the ordinals."""
    return replica.all_gather(replica.ordinal)


rank = int(os.environ["RANK"])
if sys.argv[1:] and rank == 1:
    sys.exit(3)
# Programs for torchrun ask for it before they open a device.
devices = torch.accelerator.device_count()
dist.init_process_group("tpu_dist")
layer = torch.nn.Linear(1, 1, bias=False).to("tpu")
torch.nn.init.zeros_(layer.weight)
# A copy has a storage of its own, on this process's device.
layer = copy.deepcopy(layer)
model = DistributedDataParallel(layer)
model(torch.tensor([[float(rank)]], device="tpu")).sum().backward()
mean = layer.weight.grad.item()
print(f"{rank} of {devices}: mean {mean}, launch {polyxla.launch(gather)}\n", end="", flush=True)
dist.destroy_process_group()
