"""Makes 300 tensors, and compares the process's memory."""

import torch
import torch_xla
from torch_xla_helpers import resident_bytes

device = torch_xla.device()
before = 0
for step in range(300):
    tensor = torch.ones(1 << 20).to(device) * 2
    torch_xla.sync(wait=True)
    if step == 50:
        before = resident_bytes()
print((resident_bytes() - before) < 32 << 20)
