"""Spawn as many replicas as the argument says, as scripts of torch_xla 1.x do."""

import sys

import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr


def train(index: int, text: str) -> None:
    # One string: several processes write to one pipe.
    print(f"{text} {index} {xr.world_size()}\n", end="")


if __name__ == "__main__":
    xmp.spawn(train, args=("REPLICA",), nprocs=int(sys.argv[1]))
