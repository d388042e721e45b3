"""Makes torch_xla cache a program in the directory on the command line."""

import sys

import torch
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from torch_xla_helpers import everywhere


def work() -> float:
    x = torch.arange(6.0, device=torch_xla.device()).reshape(2, 3)
    y = torch.softmax(x @ x.t(), 0)
    torch_xla.sync()
    return y.cpu().sum().item()


xr.initialize_cache(sys.argv[1], readonly=False)
print(*everywhere(work), met.counter_value("PersistentCacheMiss"))
