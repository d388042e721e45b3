"""Saving both ways, xm.save and xser.save: a plain torch_xla script. Its argument is a folder."""

import os
import sys

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.utils.serialization as xser

folder = sys.argv[1]
device = torch_xla.device()

pair = (torch.randn(2, 2, device=device), torch.randn(2, 2, device=device))
torch.save(tuple(tensor.cpu() for tensor in pair), os.path.join(folder, "tensors.pt"))
loaded = [tensor.to(device) for tensor in torch.load(os.path.join(folder, "tensors.pt"))]
assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(pair, loaded, strict=True))

model = torch.nn.Linear(4, 3).to(device)
xm.save(model.state_dict(), os.path.join(folder, "model.pt"))
xser.save(model.state_dict(), os.path.join(folder, "model.xser"))
for state in (
    torch.load(os.path.join(folder, "model.pt")),
    xser.load(os.path.join(folder, "model.xser")),
):
    copy = torch.nn.Linear(4, 3)
    copy.load_state_dict(state)
    assert torch.equal(copy.weight, model.weight.cpu())
print("saved and loaded both ways")
