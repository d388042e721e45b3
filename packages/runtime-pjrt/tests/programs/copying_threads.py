"""Whether torch_xla's Trace uses JAX, and what happens if a thread fails that reads or copies batches."""

import sys
from typing import Any

import torch
from torch_xla.debug import profiler

import polyxla

enter: Any = profiler.Trace.__enter__


def read(replica: polyxla.Replica, name: str, number: int) -> None:
    """Read batches while a thread fails in a trace with a name, the given time."""
    seen = []

    def fail(self: Any) -> None:
        enter(self)
        seen.append(self.name)
        if self.name == name and seen.count(name) == number:
            raise KeyError("a variable")

    profiler.Trace.__enter__ = fail  # type: ignore[method-assign]
    try:
        print("batches:", len(list(replica.loader([torch.ones(2)] * 5))))
    except polyxla.PolyxlaError as error:
        print("error:", error)


def train(replica: polyxla.Replica) -> None:
    """Do both."""
    replica.sync()
    with profiler.Trace("a batch"):
        print("uses jax:", "jax" in sys.modules)
    # At the end of the epoch, all batches that were read have arrived; then none has.
    read(replica, "cpu_loader.next", 3)
    read(replica, "get_batch_from_cpu_queue", 1)


if __name__ == "__main__":
    polyxla.launch(train)
