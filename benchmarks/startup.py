"""Start-up time of the command line, and of an all-reduce on four replicas, compared with peers.

    nox -s bench -- startup [commands] [replicas] [--json]

A time is the best of several runs in new processes. A ratio is ours to the peer's: of the best times of
commands, of the median times of replicas.
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

from harness import main, row

RUNS = 9
LAUNCHES = 5
BARE = ["-c", "pass"]
COMMANDS = {
    "import polyxla": ["-c", "import polyxla"],
    "polyxla --help": ["-m", "polyxla", "--help"],
    "polyxla runtimes --json": ["-m", "polyxla", "runtimes", "--json"],
    "polyxla devices": ["-m", "polyxla", "devices"],
}
ALL_REDUCE = str(Path(__file__).parent / "contestants" / "all_reduce.py")
POLYXLA = ["-m", "polyxla", "run", "--devices", "4", ALL_REDUCE]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", ALL_REDUCE]


class Runs(list[float]):
    """Wall times of runs, in seconds."""

    def add(self, arguments: list[str], environ: Mapping[str, str] = os.environ) -> None:
        """Run python with these arguments."""
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, *arguments], check=True, capture_output=True, timeout=120, env=environ
        )
        self.append(time.perf_counter() - started)

    @property
    def median(self) -> float:
        """The median, in seconds."""
        return statistics.median(self)

    def __str__(self) -> str:
        return f"{min(self):.3f} s (median {self.median:.3f})"


def measure_commands() -> None:
    """Compare commands with a bare interpreter."""
    found: dict[str, Runs] = {}
    for name, arguments in {"bare": BARE, **COMMANDS}.items():
        Runs().add(arguments)  # The first run reads the files from disk.
        found[name] = Runs()
        for _ in range(RUNS):
            found[name].add(arguments)
    bare = found["bare"]
    for name in COMMANDS:
        row(f"start: {name} / python -c pass", found[name], bare, min(found[name]) / min(bare))


def measure_replicas() -> None:
    """Compare an all-reduce on four replicas, cold and after a warm start, with torchrun; they take turns."""
    with tempfile.TemporaryDirectory() as directory:
        environ = {**os.environ, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
        warm = {**environ, "XDG_RUNTIME_DIR": directory}
        contestants = {"warm": (POLYXLA, warm), "cold": (POLYXLA, environ), "torchrun": (TORCHRUN, environ)}
        found = {name: Runs() for name in contestants}
        polyxla_warm = [sys.executable, "-m", "polyxla", "warm"]
        # Standard output is for the rows.
        subprocess.run([*polyxla_warm, "on"], check=True, timeout=300, env=warm, stdout=sys.stderr)
        try:
            for arguments, environs in contestants.values():
                Runs().add(arguments, environs)
            for _ in range(LAUNCHES):
                for name, (arguments, environs) in contestants.items():
                    found[name].add(arguments, environs)
        finally:
            subprocess.run([*polyxla_warm, "off"], check=True, timeout=60, env=warm, stdout=sys.stderr)
    warmed, cold, torchrun = found.values()
    row("start: all-reduce, warm / cold", warmed, cold, warmed.median / cold.median)
    row("start: all-reduce, warm / torchrun", warmed, torchrun, warmed.median / torchrun.median)
    row("start: all-reduce, cold / torchrun", cold, torchrun, cold.median / torchrun.median)


PARTS = {"commands": measure_commands, "replicas": measure_replicas}


if __name__ == "__main__":
    main(PARTS, globals())
