"""All-reduce in every replica until the job is ended; each replica prints its slice and its process."""

import os
import time

import torch

import polyxla
from polyxla import Replica


def train(replica: Replica) -> None:
    print(f"STEPS {os.environ['MEGASCALE_SLICE_ID']} {os.getpid()}\n", end="", flush=True)
    while True:
        float(replica.all_reduce(torch.ones(2, device=replica.device))[0])
        time.sleep(0.1)


if __name__ == "__main__":
    polyxla.launch(train)
