"""Time to compute the variables of the largest slices: ``nox -s bench -- topology [--json]``.

A time is the best of several, and a ratio is that to the longest allowed. "one host" computes all processes
of the slice on one host, as in an emulated slice; "last worker" computes the processes of one real host, with
the addresses of all hosts.
"""

from __future__ import annotations

import time

from harness import main, row

from polyxla.plugin import AcceleratorType, process_environments

LONGEST_MS = 50.0
ROUNDS = 7


def last_worker(name: str) -> int:
    """Compute the processes of one real host; return their number."""
    kind = AcceleratorType.parse(name, "benchmark")
    hostnames = [f"10.{i // 256}.{i % 256}.1" for i in range(kind.hosts)]
    return len(process_environments(kind, worker_id=kind.hosts - 1, hostnames=hostnames))


def one_host(name: str) -> int:
    """Compute all processes of the slice; return their number."""
    kind = AcceleratorType.parse(name, "benchmark")
    return len(process_environments(kind, bounds=kind.bounds.on_one_host()))


def measure_slices() -> None:
    """Measure each slice."""
    for name in ("v3-2048", "v4-4096", "v5litepod-256", "v5p-12288"):
        for case in (last_worker, one_host):
            times_ms = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                processes = case(name)
                times_ms.append((time.perf_counter() - start) * 1000)
            title = f"topology: {name}, {case.__name__.replace('_', ' ')}"
            best = min(times_ms)
            ours = f"{best:.2f} ms ({processes} processes)"
            row(title, ours, f"{LONGEST_MS:g} ms", best / LONGEST_MS)


if __name__ == "__main__":
    main({"slices": measure_slices}, globals())
