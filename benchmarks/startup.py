"""Start-up time of the command line, compared with the bare interpreter.

    nox -s bench -- startup

Each row is the best and the median of several runs in new processes, in seconds.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 9
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import polyxla": ["-c", "import polyxla"],
    "polyxla --help": ["-m", "polyxla", "--help"],
    "polyxla runtimes --json": ["-m", "polyxla", "runtimes", "--json"],
    "polyxla devices": ["-m", "polyxla", "devices"],
}


def seconds(arguments: list[str]) -> float:
    """Run python with these arguments once; return its wall time in seconds."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, timeout=60)
    return time.perf_counter() - started


def main() -> None:
    """Print the table."""
    print(f"{'command':<26}{'best s':>8}{'median s':>10}{'x python':>10}")
    bare = 0.0
    for name, arguments in COMMANDS.items():
        seconds(arguments)  # The first run reads the files from disk.
        runs = [seconds(arguments) for _ in range(RUNS)]
        bare = bare or min(runs)
        print(f"{name:<26}{min(runs):>8.3f}{statistics.median(runs):>10.3f}{min(runs) / bare:>10.1f}")


if __name__ == "__main__":
    main()
