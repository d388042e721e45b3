"""Prints how far products of float32 are from exact ones, for each precision that torch has a name for."""

from __future__ import annotations

import torch

import polyxla
from polyxla import Replica


def compute(replica: Replica) -> None:
    """Print the largest error of a product: by default, and after each setting."""
    left, right = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    exact = left.double() @ right.double()
    on_device = replica.to_device(left), replica.to_device(right)

    def error(rows: int) -> float:
        product = (on_device[0][:rows] @ on_device[1]).cpu()
        return float((product.double() - exact[:rows]).abs().max())

    print("unset", error(60), flush=True)
    for rows, name in enumerate(("highest", "high", "medium"), 61):
        torch.set_float32_matmul_precision(name)
        # A program of another shape is a new one.
        print(name, error(rows), flush=True)
    torch.set_float32_matmul_precision("highest")
    print("again", error(60), flush=True)


if __name__ == "__main__":
    polyxla.launch(compute, devices=1)
