"""One replica of `polyxla run --each`: ordinal 1 fails while the others wait for it in a collective."""

import os
import sys

import torch
import torch_xla
import torch_xla.core.xla_model as xm

if os.environ["RANK"] == "1":
    sys.exit(3)
print(xm.all_reduce("sum", torch.ones(1, device=torch_xla.device())))
