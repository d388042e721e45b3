"""Compares torch_xla's memory counters with the size of tensors."""

import gc
import time

import torch
import torch_xla
from torch_xla_helpers import xm

device = torch_xla.device()
start = xm.get_memory_info(device)["bytes_used"]
big = torch.ones(1 << 20).to(device)
more = big + 1
# torch_xla uploads a tensor when a program first needs it.
more.cpu()
info = xm.get_memory_info(device)
print(info["bytes_used"] - start, info["bytes_limit"] > info["peak_bytes_used"] >= 8 << 20)
del big, more
gc.collect()
deadline = time.monotonic() + 10
# The thread that read the tensor for cpu() releases it a moment later.
while (used := xm.get_memory_info(device)["bytes_used"] - start) and time.monotonic() < deadline:
    time.sleep(0.01)
print(used)
