"""What each replica of the trial does."""

from __future__ import annotations

import os
import resource
import statistics
import time
from typing import TYPE_CHECKING, TypedDict

from polyxla import Replica

if TYPE_CHECKING:
    import torch

STEPS = 20
"""How many steps are measured, after the first, which compiles."""
SIZE = 1024
"""Number of values that are added up."""


class Measured(TypedDict):
    """What one replica measured: times in seconds, memory in bytes."""

    total: float
    first_s: float
    step_s: float
    process: int
    peak_bytes: int


def all_reduce(replica: Replica, started: float) -> Measured:
    """Add up the ordinals of all replicas, once and then `STEPS` times.

    Args:
        replica: this replica.
        started: when the trial started, on the machine's monotonic clock.
    """
    import torch

    value = replica.to_device(torch.full((SIZE,), float(replica.ordinal + 1)))
    total = _step(replica, value)
    first_s = time.monotonic() - started
    times = []
    for _ in range(STEPS):
        begin = time.monotonic()
        _step(replica, value)
        times.append(time.monotonic() - begin)
    return {
        "total": total,
        "first_s": first_s,
        # The median: the first of them may compile once more.
        "step_s": statistics.median(times),
        "process": os.getpid(),
        # In KiB. Source: getrusage(2).
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def _step(replica: Replica, value: torch.Tensor) -> float:
    total = replica.all_reduce(value)
    # Without it torch_xla's trace keeps the reductions of all steps, and each step is a new program.
    replica.sync()
    result: float = total.mean().item()
    return result
