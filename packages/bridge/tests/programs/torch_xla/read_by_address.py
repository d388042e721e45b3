"""Reads a computed tensor at the address of its memory."""

import ctypes

import torch
import torch_xla
import torch_xla.core.xla_model as xm

tensor = torch.arange(5, device="xla") + 1
torch_xla.sync()
xm.wait_device_ops()
address = torch_xla._XLAC._unsafe_buffer_pointer(tensor)  # type: ignore[attr-defined]
print(list((ctypes.c_int64 * 5).from_address(address)))
