"""Read an all-reduce in a loop, and sync after each read if the argument is ``sync``."""

import sys

import torch
import torch_xla

import polyxla


def read(replica: polyxla.Replica) -> float:
    ones, total = torch.ones(3, device=replica.device), 0.0
    for _ in range(15):
        total += replica.all_reduce(ones).sum().item()
        if sys.argv[1:] == ["sync"]:
            torch_xla.sync()
    return total


if __name__ == "__main__":
    print(polyxla.launch(read))
