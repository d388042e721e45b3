"""A program for torchrun: each process prints its rank, and the sum of all."""

from __future__ import annotations

import torch
import torch.distributed as dist

dist.init_process_group("tpu_dist")
total = torch.tensor([float(dist.get_rank())], device="tpu")
dist.all_reduce(total)
print(f"{dist.get_rank()} of {dist.get_world_size()}: {total.item()}\n", end="", flush=True)
dist.destroy_process_group()
