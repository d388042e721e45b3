"""Print where torch_xla says that each replica's device is, and the sum of all ordinals."""

import os
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr


def describe(index: int) -> None:
    ordinal = xr.global_ordinal()
    total = xm.all_reduce("sum", torch.ones(2, device=torch_xla.device()) * ordinal)
    torch_xla.sync()
    devices: Any = xr.global_runtime_device_attributes()
    places = [(device.get("slice_index"), *device["coords"]) for device in devices]
    found = [ordinal, xr.host_index(), os.environ.get("MEGASCALE_SLICE_ID"), int(total[0].item()), places]
    # One string: several processes write to one pipe.
    print(f"DESCRIBED {found!r}\n", end="", flush=True)


if __name__ == "__main__":
    torch_xla.launch(describe)
