"""Print the numbers that torchrun and torch_xla give to this process, and the sum of all ordinals."""

import os
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

total: Any = xm.all_reduce("sum", torch.ones(1, device=torch_xla.device()) * xr.global_ordinal())
torch_xla.sync()
numbers = [
    os.environ["RANK"],
    os.environ["LOCAL_RANK"],
    xr.global_ordinal(),
    xr.local_ordinal(),
    xr.process_index(),
    xr.host_index(),
    int(total.item()),
]
# One string: several processes write to one pipe.
print(" ".join(map(str, ["DESCRIBED", *numbers])) + "\n", end="", flush=True)
