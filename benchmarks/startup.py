"""Start-up time of the command line, and of an all-reduce on four replicas, compared with peers.

    nox -s bench -- startup

Each row is the best and the median of several runs in new processes, in seconds, and its ratio: that of the
command line to the bare interpreter, that of a warm start of the replicas to a cold one, and to torchrun.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

RUNS = 9
LAUNCHES = 5
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import polyxla": ["-c", "import polyxla"],
    "polyxla --help": ["-m", "polyxla", "--help"],
    "polyxla runtimes --json": ["-m", "polyxla", "runtimes", "--json"],
    "polyxla devices": ["-m", "polyxla", "devices"],
}
ALL_REDUCE = str(Path(__file__).parent / "contestants" / "all_reduce.py")
POLYXLA = ["-m", "polyxla", "run", "--devices", "4", ALL_REDUCE]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", ALL_REDUCE]
AIMS = {"cold": 0.25, "torchrun, gloo": 1.0}
"""The largest allowed ratio of a warm start to each of the others."""


def seconds(arguments: list[str], environ: Mapping[str, str] = os.environ) -> float:
    """Run python with these arguments once; return its wall time in seconds."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, timeout=120, env=environ)
    return time.perf_counter() - started


def command_line() -> None:
    """Print the rows of the command line."""
    print(f"{'command':<26}{'best s':>8}{'median s':>10}{'x python':>10}")
    bare = 0.0
    for name, arguments in COMMANDS.items():
        seconds(arguments)  # The first run reads the files from disk.
        runs = [seconds(arguments) for _ in range(RUNS)]
        bare = bare or min(runs)
        print(f"{name:<26}{min(runs):>8.3f}{statistics.median(runs):>10.3f}{min(runs) / bare:>10.1f}")


def replicas() -> None:
    """Print the rows of the all-reduce on four replicas, which take turns."""
    with tempfile.TemporaryDirectory() as directory:
        environ = {**os.environ, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
        warm = {**environ, "XDG_RUNTIME_DIR": directory}
        contestants = {
            "warm": (POLYXLA, warm),
            "cold": (POLYXLA, environ),
            "torchrun, gloo": (TORCHRUN, environ),
        }
        subprocess.run([sys.executable, "-m", "polyxla", "warm", "on"], check=True, timeout=300, env=warm)
        try:
            runs = {name: [seconds(*command)] for name, command in contestants.items()}
            for _ in range(LAUNCHES):
                for name, command in contestants.items():
                    runs[name].append(seconds(*command))
        finally:
            subprocess.run([sys.executable, "-m", "polyxla", "warm", "off"], check=True, timeout=60, env=warm)
    print(f"\n{'all-reduce, 4 replicas':<26}{'best s':>8}{'median s':>10}{'warm x':>10}{'at most':>10}")
    # Without the first, which reads the files from disk.
    medians = {name: statistics.median(times[1:]) for name, times in runs.items()}
    for name, median in medians.items():
        aim = f"{AIMS[name]:>10.2f}" if name in AIMS else ""
        print(f"{name:<26}{min(runs[name]):>8.2f}{median:>10.2f}{medians['warm'] / median:>10.2f}{aim}")


if __name__ == "__main__":
    command_line()
    replicas()
