"""Launch a function that uses a lock of its module: each process makes its own when it imports the module."""

import threading

import torch_xla
import torch_xla.runtime as xr

LOCK = threading.Lock()


def train(index: int) -> None:
    with LOCK:
        print(f"LOCKED {xr.global_ordinal()}\n", end="", flush=True)


if __name__ == "__main__":
    torch_xla.launch(train)
