"""Make steps on a slice of several hosts, until a replica on host 1 raises, if the argument says so."""

import sys
import time

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr


def train(_: int, how: str) -> None:
    while True:
        float(xm.all_reduce("sum", torch.ones(2, device=torch_xla.device()))[0])
        print("STEP\n", end="", flush=True)
        if how == "raise" and xr.global_ordinal() == 5:
            raise ValueError("no data")
        time.sleep(0.1)


if __name__ == "__main__":
    torch_xla.launch(train, args=(sys.argv[1],))
