"""One replica of `polyxla run --each`: torch.distributed, collectives, and three launches that join."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_backend
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr

import polyxla

rank = int(os.environ["RANK"])
dist.init_process_group("xla", init_method=sys.argv[1])
ours = torch.full((1,), float(rank), device=torch_xla.device())
dist.all_reduce(ours)
theirs: Any = xm.all_reduce("sum", torch.full((1,), float(rank), device="xla"))
torch_xla.sync()


def gather(replica: polyxla.Replica) -> tuple[list[int], int]:
    return replica.all_gather(replica.ordinal), replica.world_size


launched = polyxla.launch(gather)
plain: list[int] = []
spawned: list[int] = []
torch_xla.launch(plain.append)
xmp.spawn(spawned.append, nprocs=xr.world_size())
words = [rank, dist.get_rank(), xr.world_size(), int(ours), int(theirs), launched, plain, spawned]
# One string: several processes write to one pipe.
print("EACH " + " ".join(map(str, words)) + "\n", end="", flush=True)
