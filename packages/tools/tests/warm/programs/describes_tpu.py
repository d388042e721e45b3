"""Prints what torch_xla knows of its TPU host, and the variables that describe it."""

import os

import torch
import torch_xla
from torch_xla._internal import tpu

# Random in each job.
DRAWN = ("POLYXLA_LIBTPU_DEV",)
PREFIXES = ("TPU_", "PJRT_", "XLA_", "PTXLA_", "LIBTPU_", "POLYXLA_")

total = torch.ones(2, device="xla").sum().item()
found = {
    "total": total,
    "_found_libtpu": torch_xla._found_libtpu,
    "chips": tpu.num_available_chips(),
    "version": tpu.version(),
    "variables": sorted(
        item for item in os.environ.items() if item[0].startswith(PREFIXES) and item[0] not in DRAWN
    ),
}
print(found)
