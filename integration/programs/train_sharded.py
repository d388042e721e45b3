"""An SPMD program: one process trains a linear model whose batch is sharded over all devices.

Argument: ``hybrid`` for a mesh by the places of the devices.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd.xla_sharding as xs
import torch_xla.runtime as xr

xr.use_spmd()
count = xr.global_runtime_device_count()
if "hybrid" in sys.argv:
    mesh: xs.Mesh = xs.HybridMesh(ici_mesh_shape=(count,), axis_names=("data",))
else:
    mesh = xs.Mesh(np.arange(count), (count,), ("data",))
torch.manual_seed(0)
data = torch.randn(8, 3)
model = torch.nn.Linear(3, 1).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    batch = data.to("xla")
    xs.mark_sharding(batch, mesh, ("data", None))
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
print(f"RESULT {count} {loss.item():.6f}")
