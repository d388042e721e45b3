"""Divides tensors while the programs that compute them run, and prints how many were right."""

import numpy as np
import torch
import torch_xla
import torch_xla.runtime as xr
from torch_xla.distributed.spmd import xla_sharding as xs

xr.use_spmd()
count = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(count), (count,), ("all",))
right = 0
for step in range(10):
    x = torch.full((256 + step, 256), 0.5).to("xla")
    y = x
    for _ in range(3):
        y = (y @ y.t() @ x).tanh()
    torch_xla.sync()
    xs.mark_sharding(y, mesh, ("all", None))
    right += y.cpu().sum().item() == y.numel()
print(right)
