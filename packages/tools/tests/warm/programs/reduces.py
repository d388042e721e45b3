"""Launches replicas, which reduce once, print the ids of the processes, and wait if asked to."""

import os
import sys
import time

import torch

import polyxla


def reduce(replica: polyxla.Replica) -> float:
    """Reduce; with an argument, print and wait for the end."""
    total = replica.all_reduce(torch.ones(2, device=replica.device))
    value = float(total.sum())
    if len(sys.argv) > 1:
        os.write(1, f"{os.getpid()}\n".encode())
        time.sleep(120)
    return value


if __name__ == "__main__":
    print(polyxla.launch(reduce))
