"""Replicas call sys.exit(0), in each of torch_xla's launches; print what the program gets."""

import os
import sys
from collections.abc import Callable

import torch_xla
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr


def train(index: int, leaving: str = "last") -> None:
    if leaving == "all" or index == xr.world_size() - 1:
        sys.exit(0)


def report(name: str, launch: Callable[[], object]) -> None:
    try:
        launch()
    except (Exception, SystemExit) as error:
        print(f"{name}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    os.environ["CPU_NUM_DEVICES"] = "2"
    report("launch 2", lambda: torch_xla.launch(train))
    report("all of 2", lambda: torch_xla.launch(train, args=("all",)))
    report("spawn 2", lambda: xmp.spawn(train, args=("all",)))
    # One replica is torch_xla's own to start, in a process pool and in this process.
    del os.environ["CPU_NUM_DEVICES"]
    report("launch 1", lambda: torch_xla.launch(train))
    report("spawn 1", lambda: xmp.spawn(train, nprocs=1))
