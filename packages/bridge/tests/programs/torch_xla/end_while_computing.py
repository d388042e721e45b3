"""Ends while its last step still computes, for longer than the end of a program waits for an idle device."""

import torch
import torch_xla

from polyxla_bridge import activation

activation.FINISH_TIMEOUT_S = 0.4
matrix = torch.rand(1500, 1500, device="xla")
for _ in range(30):
    matrix = matrix @ matrix / 1000
torch_xla.sync()
