"""Writes a profile to the directory on the command line."""

import sys

import torch
import torch_xla.debug.profiler as xp

xp.start_trace(sys.argv[1])
print((torch.ones(2, device="xla") + 1).sum().item())
xp.stop_trace()
