"""Print where TorchTPU says that each rank's device is, and its mesh of the slices' chips."""

import os

import torch
import torch.distributed as dist
from torch_tpu._internal.distributed import device_mesh, tpu_distributed

dist.init_process_group("tpu_dist")
rank = dist.get_rank()
total = torch.ones(2, device="tpu") * rank
dist.all_reduce(total)
places = [(device.slice_index, *device.coords) for device in tpu_distributed.global_device_attributes()]
mesh = device_mesh.topology_aware_mesh("tpu", (2, 4)).tolist()
found = [rank, os.environ["MEGASCALE_SLICE_ID"], int(total[0].item()), places, mesh]
# One string: several processes write to one pipe.
print(f"DESCRIBED {found!r}\n", end="", flush=True)
