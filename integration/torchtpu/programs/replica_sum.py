"""A script with polyxla.launch: each replica prints its ordinal, and the sum of all."""

from __future__ import annotations

import torch

import polyxla
from polyxla import Replica


def main(replica: Replica) -> None:
    """Sum the ordinals."""
    ordinal = replica.world.ordinal
    total = replica.all_reduce(torch.tensor([float(ordinal)], device=replica.device), "sum")
    print(f"{ordinal} of {replica.world.world_size}: {total.item()}\n", end="", flush=True)


if __name__ == "__main__":
    polyxla.launch(main)
