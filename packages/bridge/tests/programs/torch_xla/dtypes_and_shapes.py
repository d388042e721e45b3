"""Arrays of every dtype and of odd shapes, to the device and back."""

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

device = torch_xla.device()
dtypes = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16),
    *(torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
for dtype in dtypes:
    here = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    back = here.to(device).cpu()
    wide = torch.complex128
    assert back.dtype == dtype, dtype
    assert torch.equal(back.to(wide), here.to(wide)), dtype
for shape in [(), (0,), (3, 0, 2), (1,), (2, 3, 4)]:
    here = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    assert torch.equal(here.to(device).cpu(), here), shape
turned = torch.arange(6.0).reshape(2, 3).t()
assert torch.equal(turned.to(device).cpu(), turned)
print(xm.xla_device_hw(device), xr.device_type(), xr.global_device_count(), "all the same")
