"""Trains with FSDPv2 on all devices, and with torch alone; the command line names the mesh.

Prints for each step whether the losses are equal, then the shapes of a parameter's shards and its own.
"""

import copy
import functools
import sys
import warnings

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd.xla_sharding as xs
import torch_xla.runtime as xr
from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel


class Block(torch.nn.Module):
    """Attention and a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.network = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the block computes."""
        x = x + self.attention(x, x, x, need_weights=False)[0]
        result: torch.Tensor = x + self.network(x)
        return result


def train(model: torch.nn.Module, data: torch.Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (model(data) - 1).square().mean()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.item())
    return losses


# No gradients are computed with respect to the data, says a hook of torch_xla's.
warnings.filterwarnings("ignore", "Full backward hook is firing")
xr.use_spmd()
axes = {"fsdp": (4, 1), "fsdp+model": (2, 2)}[sys.argv[1]]
mesh = xs.Mesh(np.arange(4), axes, ("fsdp", "model"))
xs.set_global_mesh(mesh)
torch.manual_seed(0)
here = torch.nn.Sequential(Block(), Block())
there = copy.deepcopy(here)
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
sharded = SpmdFullyShardedDataParallel(there, auto_wrap_policy=policy)
data = torch.randn(8, 5, 16)
batch = data.to("xla")
xs.mark_sharding(batch, mesh, ("fsdp", None, None))
expected, found = train(here, data), train(sharded, batch)
print(*(abs(a - b) < 1e-5 for a, b in zip(expected, found, strict=True)))
first = next(there.parameters())
print({tuple(shard.data.shape) for shard in xs.wrap_if_sharded(first).local_shards}, tuple(first.shape))
