"""Print each replica's ordinal, index and world size, the sum of all ordinals, and a rendezvous of names."""

from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr


def train(index: int) -> None:
    total: Any = xm.all_reduce("sum", torch.ones((), device=torch_xla.device()) * xr.global_ordinal())
    torch_xla.sync()
    names = xm.rendezvous("names", str(xr.global_ordinal()).encode())
    words = [xr.global_ordinal(), index, xr.world_size(), int(total), b"".join(names).decode()]
    # One string: several processes write to one pipe.
    print(" ".join(map(str, ["ORDINAL", *words])) + "\n", end="")


if __name__ == "__main__":
    torch_xla.launch(train)
