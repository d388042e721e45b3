"""Each replica all-reduces its ordinal and prints the sum: what hangs on torch_xla's own CPU client."""

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla import runtime as xr


def _mp_fn(index):
    ordinal = torch.tensor([float(xr.global_ordinal())], device=torch_xla.device())
    xm.all_reduce(xm.REDUCE_SUM, [ordinal])
    torch_xla.sync()
    # One string: replicas may be threads, and print writes its arguments one by one.
    print(f"ordinal {index} of {xr.world_size()} sum {ordinal.item()}\n", end="", flush=True)


if __name__ == "__main__":
    torch_xla.launch(_mp_fn, args=())
