"""A replica of the second host raises after the first step; the others wait for it in the next one."""

import sys

import torch

import polyxla


def train(replica: polyxla.Replica) -> None:
    for step in range(2):
        if step == 1 and replica.ordinal == replica.world_size - 1:
            raise ValueError("no more records")
        total = replica.all_reduce(torch.ones(2, device=replica.device))
        print(f"step {step}, total {total.cpu().tolist()}", flush=True)


if __name__ == "__main__":
    polyxla.launch(train)
    sys.exit(0)
