"""Trains for 2001 steps; prints live arrays, device memory and process memory after 500 and 2000 steps."""

import time

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla_helpers import engine, resident_bytes

device = torch_xla.device()
model = torch.nn.Linear(64, 64).to(device)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.randn(32, 64)
for step in range(2001):
    optimizer.zero_grad()
    model(data.to(device)).square().mean().backward()
    optimizer.step()
    torch_xla.sync()
    if step in (500, 2000):
        xm.wait_device_ops()
        # torch_xla's threads release the last arrays when they get to it, which is later on a busy host.
        time.sleep(1)
        live = len(engine()._accounts[0]._live)
        print(live, engine().memory_stats(engine().devices[0])["bytes_in_use"], resident_bytes())
