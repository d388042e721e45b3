"""The process of the trial: launches the replicas, and writes what they measured, or the error, to a file."""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from polyxla import PolyxlaError, Replica, launch
from polyxla.plugin import end_with_parent

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
        # The median, because the first of these steps may compile once more.
        "step_s": statistics.median(times),
        "process": os.getpid(),
        # In KiB. Source: getrusage(2).
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def _step(replica: Replica, value: torch.Tensor) -> float:
    total = replica.all_reduce(value)
    # Without this, torch_xla's trace keeps the reductions of all steps, and each step is a new program.
    replica.sync()
    result: float = total.mean().item()
    return result


def main(runtime: str, devices: str, started: str, answer: str) -> None:
    """Run the trial.

    Args:
        runtime: the runtime's name.
        devices: the indices of the devices, as JSON.
        started: when the trial started, on the machine's monotonic clock.
        answer: the file to write.
    """
    # `polyxla doctor` may be killed with SIGKILL, after which nothing else would end this process.
    end_with_parent()
    try:
        results = launch(all_reduce, [float(started)], runtime=runtime, devices=json.loads(devices))
    except Exception as error:
        text = str(error) if isinstance(error, PolyxlaError) else f"{type(error).__name__}: {error}"
        Path(answer).write_text(json.dumps({"error": text}))
        # The traceback belongs in the log as well.
        raise
    Path(answer).write_text(json.dumps({"replicas": results}))


if __name__ == "__main__":
    # Replicas import the function by its module's name, which is another one in the process of `-m`.
    from polyxla_tools.doctor import trial_process  # noqa: PLW0406

    trial_process.main(*sys.argv[1:])
