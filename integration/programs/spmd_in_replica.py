"""A program whose replicas ask for SPMD."""

from __future__ import annotations

import torch_xla
import torch_xla.runtime as xr


def train(index: int) -> None:
    try:
        xr.use_spmd()
    except RuntimeError as error:
        print(f"REFUSED {error}\n", end="", flush=True)


if __name__ == "__main__":
    torch_xla.launch(train)
