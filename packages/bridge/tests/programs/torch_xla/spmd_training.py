"""Trains on all devices by one partitioned program, and with torch alone; the command line names the mesh.

Prints for each step whether the losses are equal, then whether the parameters are, and the shapes of the
shards of the batch and of a weight.
"""

import copy
import sys

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd.xla_sharding as xs
import torch_xla.runtime as xr

MESHES = {"data": (4, 1), "model": (1, 4), "both": (2, 2)}


def train(model: torch.nn.Module, data: torch.Tensor, labels: torch.Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(data), labels)
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.item())
    return losses


xr.use_spmd()
mesh = xs.Mesh(np.arange(xr.global_runtime_device_count()), MESHES[sys.argv[1]], ("data", "model"))
torch.manual_seed(0)
layers = [torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 8)]
here = torch.nn.Sequential(*layers)
there = copy.deepcopy(here).to("xla")
weight = list(there.parameters())[-2]
xs.mark_sharding(weight, mesh, ("model", None))
data, labels = torch.randn(16, 1, 8, 8), torch.randint(8, (16,))
batch = data.to("xla")
xs.mark_sharding(batch, mesh, ("data", None, None, None))
expected, found = train(here, data, labels), train(there, batch, labels.to("xla"))
print(*(abs(a - b) < 1e-5 for a, b in zip(expected, found, strict=True)))
pairs = zip(here.parameters(), there.parameters(), strict=True)
print(all((a - b.cpu()).abs().max().item() < 1e-4 for a, b in pairs))
shards = [xs.wrap_if_sharded(tensor).local_shards for tensor in (batch, weight)]
print(*({tuple(shard.data.shape) for shard in of_one} for of_one in shards))
