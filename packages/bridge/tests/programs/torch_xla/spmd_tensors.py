"""What a program does with tensors under SPMD, besides training. Prints a line for each part."""

import copy
import gc

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd.xla_sharding as xs
import torch_xla.runtime as xr
from torch_xla_helpers import engine

from polyxla_testing.processes import wait_until


def used_bytes() -> list[int]:
    """Return the memory in use on each device."""
    gc.collect()
    return [engine().memory_stats(device)["bytes_in_use"] for device in engine().devices]


xr.use_spmd()
mesh = xs.Mesh(np.arange(4), (4,), ("all",))

# A computed tensor is read back, and sent out again in parts.
x = torch.ones(8, 2).to("xla")
y = x + 1
torch_xla.sync()
# Without polyxla's core, torch_xla refuses to divide a tensor that is being computed.
xm.wait_device_ops()
xs.mark_sharding(y, mesh, ("all", None))
print(y.cpu().sum().item(), (y @ y.t()).sum().item())

# A copy of a computed tensor is computed when it is marked.
copied = copy.deepcopy(y)
twice = copy.deepcopy(torch.ones(8, 2).to("xla"))
xs.mark_sharding(twice, mesh, ("all", None))
print(copied.cpu().sum().item(), twice.cpu().sum().item())

# Other shards of the same tensor.
xs.clear_sharding(y)
xs.mark_sharding(y, mesh, (None, None))
print(xs.wrap_as_sharded_tensor(y).sharding_spec, y.sum().item())

# Shards are computed first, if need be.
z = torch.arange(16.0).to("xla")
xs.mark_sharding(z, mesh, ("all",))
w = z * 2
xs.mark_sharding(w, mesh, ("all",))
parts = xs.wrap_as_sharded_tensor(w).local_shards
print([part.data.tolist() for part in parts])

# Sizes that the devices cannot share equally.
odd = torch.arange(10.0).to("xla")
xs.mark_sharding(odd, mesh, ("all",))
print((odd + 1).cpu().tolist())

# Each device has its part of a large tensor, and no more.
used = used_bytes()
large = torch.zeros(1 << 20).to("xla")
xs.mark_sharding(large, mesh, ("all",))
torch_xla.sync()
# Read it: `sync(wait=True)` waits until the program has started, not until the device has the memory.
large.cpu()


def parts_of_large() -> list[int]:
    """Return the memory that each device uses since `used`, in KiB."""
    return [round((now - then) / 1024) for then, now in zip(used, used_bytes(), strict=True)]


# What a device holds for the read is free when its thread has ended it.
wait_until(lambda: max(parts_of_large()) <= 1024, "the end of the read on all devices")
print(parts_of_large())
