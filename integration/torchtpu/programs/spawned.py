"""Processes that torch.multiprocessing starts after TorchTPU has set up its launch."""

import os

import torch
import torch.distributed as dist


def work(rank, world):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    dist.init_process_group("tpu_dist", rank=rank, world_size=world)
    total = torch.tensor(float(rank), device="tpu")
    dist.all_reduce(total)
    print(f"sum={total.item()}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    from torch.tpu import distributed

    world = 4
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    distributed.set_tpu_launch_env(nproc_per_node=world)
    print(os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"], flush=True)
    torch.multiprocessing.spawn(work, (world,), nprocs=world)
