"""Run one program on DEVICES replicas; print each one's result and the counters of the compilation cache."""

import sys
from typing import Any

import polyxla


def work(replica: polyxla.Replica) -> tuple[Any, ...]:
    import torch
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met

    # As data: a number would be part of the program.
    x = (torch.arange(6.0).reshape(2, 3) + replica.ordinal).to(replica.device)
    total: Any = xm.all_reduce("sum", torch.softmax(x @ x.t(), 0).sum())
    # Read before the counters: this compiles and runs the program.
    result = round(total.cpu().item(), 4)
    counts = [met.counter_value(f"polyxla.ProgramCache{name}") or 0 for name in ("Hit", "Miss")]
    return result, *counts, met.counter_value("PersistentCacheMiss") or 0


if __name__ == "__main__":
    for found in polyxla.launch(work, devices=int(sys.argv[1])):
        print(*found)
