"""One all-reduce on four replicas: launched by polyxla, or by torchrun with gloo."""

from __future__ import annotations

import os

import torch


def on_replicas() -> None:
    """Launch replicas, and check their sum."""
    import polyxla

    def reduce(replica: polyxla.Replica) -> float:
        return float(replica.all_reduce(torch.ones(8, device=replica.device)).sum())

    assert polyxla.launch(reduce) == [32.0] * 4


def in_process_group() -> None:
    """Join the process group of torchrun, and check the sum."""
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    tensor = torch.ones(8)
    torch.distributed.all_reduce(tensor)
    assert float(tensor.sum()) == 32.0
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    in_process_group() if "RANK" in os.environ else on_replicas()
