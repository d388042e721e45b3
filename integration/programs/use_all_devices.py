"""A program that launches nothing, and computes on each device of its process."""

from __future__ import annotations

import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

sizes = [xr.world_size()]
devices = xm.get_xla_supported_devices()
sums = [(torch.arange(4, device=device) + index).sum().item() for index, device in enumerate(devices)]
print(f"RESULT {devices} {sums} {[*sizes, xr.world_size()]}")
