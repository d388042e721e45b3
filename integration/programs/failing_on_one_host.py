"""The last replica, on the last host, fails after the first step; the others wait for it in the next one.

Its argument says how: ``raise``, ``kill``, ``return`` or ``hang``.
"""

import os
import signal
import sys
import time

import torch

import polyxla


def train(replica: polyxla.Replica, how: str) -> None:
    for step in range(2):
        if step == 1 and replica.ordinal == replica.world_size - 1:
            if how == "return":
                return
            fail(how)
        total = replica.all_reduce(torch.ones(2, device=replica.device))
        print(f"step {step}, total {total.cpu().tolist()}", flush=True)


def fail(how: str) -> None:
    if how == "raise":
        raise ValueError("no more records")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


if __name__ == "__main__":
    polyxla.launch(train, (sys.argv[1],))
    sys.exit(0)
