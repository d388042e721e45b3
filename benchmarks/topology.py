"""Time to compute the variables of the largest slices: ``python benchmarks/topology.py``.

Target: under 50 ms each. "one host" computes all processes of the slice on one host, as in an emulated slice;
"last worker" computes the processes of one real host, with the addresses of all hosts.
"""

from __future__ import annotations

import time

from polyxla.plugin import AcceleratorType, process_environments

TARGET_MS = 50.0
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


def main() -> None:
    """Print the best of several rounds for each slice."""
    print(f"{'type':<14} {'case':<12} {'processes':>9} {'best ms':>8}  under {TARGET_MS:.0f} ms")
    for name in ("v3-2048", "v4-4096", "v5litepod-256", "v5p-12288"):
        for case in (last_worker, one_host):
            times_ms = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                processes = case(name)
                times_ms.append((time.perf_counter() - start) * 1000)
            verdict = "yes" if min(times_ms) < TARGET_MS else "NO"
            label = case.__name__.replace("_", " ")
            print(f"{name:<14} {label:<12} {processes:>9} {min(times_ms):>8.2f}  {verdict}")


if __name__ == "__main__":
    main()
