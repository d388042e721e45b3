"""Redistribute a tensor over the devices of an SPMD program; print each sharding."""

import numpy as np
import torch
import torch_xla
import torch_xla.runtime as xr
from torch.distributed.tensor import Replicate, Shard
from torch_xla.distributed.spmd import xla_sharding as xs

xr.use_spmd()
devices = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(devices), (devices,), ("x",))
values = torch.arange(float(devices * devices)).reshape(devices, devices)
tensor = xs.mark_sharding(values.to("xla"), mesh, ("x", None))
torch_xla.sync()
sharding_of = torch_xla._XLAC._get_xla_sharding_spec  # type: ignore[attr-defined]
print(sharding_of(tensor.global_tensor))
for placement in (Replicate(), Shard(1), Shard(0)):
    tensor = tensor.redistribute(mesh, [placement])
    torch_xla.sync()
    print(sharding_of(tensor.global_tensor))
    assert tensor.global_tensor.cpu().equal(values)
