"""Prints how many threads torch's operations on the host have in each replica."""

from typing import Any

import torch

import polyxla


def count(replica: Any) -> int:
    return torch.get_num_threads()


if __name__ == "__main__":
    print("THREADS", polyxla.launch(count))
