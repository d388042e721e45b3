"""A program that launches nothing, and computes on each device of its process."""

from __future__ import annotations

import torch
import torch_xla.core.xla_model as xm

devices = xm.get_xla_supported_devices()
sums = [(torch.arange(4, device=device) + index).sum().item() for index, device in enumerate(devices)]
print(f"RESULT {devices} {sums}")
