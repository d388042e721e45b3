"""Checkpoint writing compared with safetensors' writer: ``python benchmarks/checkpoint_files.py [--json]``.

Both write a state of 1 GiB, whose largest tensor has 256 MiB, to the same directory in turns, with fsync.
Targets: at most 1.1 times the time, and additional host memory of at most the largest tensor plus 64 MiB.
The memory is measured in new processes: one with contiguous tensors, and one with transposed tensors, each
of which must be copied first, as from a device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from polyxla_training.checkpoint import load, save

SIZES_MIB = (256, 256, 128, 128, 128, 64, 32, 16, 8, 8)
ROUNDS = 3
MAX_RATIO = 1.1
MAX_MEMORY_MIB = max(SIZES_MIB) + 64


def state(transposed: bool) -> dict[str, torch.Tensor]:
    """Make 1 GiB of float32 tensors, with or without gaps."""
    tensors = {f"layer.{at}.weight": torch.rand(size, 2**18) for at, size in enumerate(SIZES_MIB)}
    return {name: tensor.t() if transposed else tensor for name, tensor in tensors.items()}


def save_safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write with safetensors, with fsync as in `polyxla_training.save`."""
    save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def seconds(action: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def peak_mib(transposed: bool) -> float:
    """Return how much saving raises the peak memory of a new process, in MiB."""
    code = f"import checkpoint_files; checkpoint_files.print_peak({transposed})"
    directory = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=directory, check=True, capture_output=True, timeout=300
    )
    return float(done.stdout)


def print_peak(transposed: bool) -> None:
    """Save once, and print how much the peak memory of this process rises, in MiB."""
    tensors = state(transposed)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        save({"warm": torch.zeros(1)}, Path(directory, "warm.safetensors"))
        # Source: proc_pid_clear_refs(5): 5 resets VmHWM to the current use.
        Path("/proc/self/clear_refs").write_text("5")
        before = high_water_mib()
        save(tensors, Path(directory, "state.safetensors"))
        print(high_water_mib() - before)


def high_water_mib() -> float:
    """Return the peak memory of this process, in MiB; getrusage would include the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def measure() -> dict[str, float]:
    """Return all figures."""
    tensors = state(transposed=False)
    times: dict[str, list[float]] = {
        "save": [],
        "save_file": [],
        "load": [],
        "load, unverified": [],
        "load_file": [],
    }
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        ours, theirs = Path(directory, "ours.safetensors"), Path(directory, "theirs.safetensors")
        for _ in range(ROUNDS):
            times["save_file"].append(seconds(lambda: save_safetensors(tensors, theirs)))
            times["save"].append(seconds(lambda: save(tensors, ours)))
        for _ in range(ROUNDS):
            times["load_file"].append(
                seconds(lambda: [tensor.sum() for tensor in load_file(theirs).values()])
            )
            times["load"].append(seconds(lambda: [tensor.sum() for tensor in load(ours).values()]))
            times["load, unverified"].append(
                seconds(lambda: [tensor.sum() for tensor in load(ours, verify=False).values()])
            )
    figures = {f"{name}, s": min(runs) for name, runs in times.items()}
    figures["save / save_file"] = figures["save, s"] / figures["save_file, s"]
    figures["peak memory, MiB"] = peak_mib(transposed=False)
    figures["peak memory, each copied, MiB"] = peak_mib(transposed=True)
    return figures


def main() -> None:
    """Print the table, or JSON."""
    figures = measure()
    if "--json" in sys.argv:
        print(json.dumps(figures))
        return
    bounds = {
        "save / save_file": MAX_RATIO,
        "peak memory, MiB": MAX_MEMORY_MIB,
        "peak memory, each copied, MiB": MAX_MEMORY_MIB,
    }
    table = Table("figure", "best", "at most")
    for name, value in figures.items():
        table.add_row(name, f"{value:.2f}", f"{bounds[name]:g}" if name in bounds else "")
    Console().print(table)


if __name__ == "__main__":
    main()
