"""Make steps on a slice of several hosts, until a replica on host 1 raises, if the argument says so."""

import sys
import time

import torch

import polyxla
from polyxla import Replica


def train(replica: Replica, how: str) -> None:
    while True:
        float(replica.all_reduce(torch.ones(2, device=replica.device))[0])
        print("STEP\n", end="", flush=True)
        if how == "raise" and replica.ordinal == 5:
            raise ValueError("no data")
        time.sleep(0.1)


if __name__ == "__main__":
    polyxla.launch(train, (sys.argv[1],))
