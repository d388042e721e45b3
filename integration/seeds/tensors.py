"""Tensors on the XLA device, as a plain torch_xla script makes them: nothing here knows polyxla."""

import torch
import torch_xla
import torch_xla.core.xla_model as xm

first = torch.randn(2, 2, device="xla")
print(first.device)
print(first)

second = torch.randn(2, 2, device=torch_xla.device())
print(first + second)
print(first.mm(second))

vector = torch.randn(10, device="xla")
layer = torch.nn.Linear(10, 20).to("xla")
print(layer(vector))

try:
    print(torch.nn.Linear(10, 20)(vector))
except RuntimeError as error:
    print("devices do not mix:", "xla" in str(error).lower())

product = first * second
assert "aten::mul" in torch_xla._XLAC._get_xla_tensors_text([product])
print("hardware", xm.xla_device_hw(torch_xla.device()))
