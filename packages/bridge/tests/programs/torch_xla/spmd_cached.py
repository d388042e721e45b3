"""Computes the same on one device, or by a partitioned program if the command line says so.

Prints the result, then the number of compilations, and of programs that the cache had.
"""

import sys

import torch
import torch_xla
import torch_xla.runtime as xr
from torch_xla_helpers import engine

if sys.argv[1] == "partitioned":
    xr.use_spmd()
x = torch.arange(6.0, device="xla").reshape(2, 3)
y = torch.softmax(x @ x.t(), 0)
torch_xla.sync()
print(round(y.cpu().sum().item(), 5), engine().compiles, engine().cache.hits)
