"""Print what torch_xla says of each replica: its numbers, the hardware, and the sum of all ordinals."""

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr


def describe(index: int) -> None:
    total = xm.all_reduce("sum", torch.ones(2, device=torch_xla.device()) * xr.global_ordinal())
    torch_xla.sync()
    numbers = [
        index,
        xr.global_ordinal(),
        xr.world_size(),
        xr.local_ordinal(),
        xr.process_index(),
        xr.process_count(),
        xr.local_process_count(),
        xr.host_index(),
        xr.addressable_device_count(),
    ]
    words = [xm.xla_device_hw(torch_xla.device()), xr.device_type(), int(total[0].item())]
    # One string: several processes write to one pipe.
    print(" ".join(map(str, ["DESCRIBED", *numbers, *words])) + "\n", end="", flush=True)


if __name__ == "__main__":
    torch_xla.launch(describe)
