"""Rank 1 ends without a word; rank 0 sends to it, or receives from it: the first argument."""

import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("tpu_dist")
rank = dist.get_rank()
x = torch.full((3,), float(rank), device="tpu")
dist.barrier()
if rank == 1:
    os._exit(0)
if rank == 0:
    dist.send(x, 1) if sys.argv[1] == "send" else dist.recv(x, 1)
    print(x.tolist())
time.sleep(300)
