"""Print how many child processes exist before the launch, and whether they start the replicas."""

import os
from pathlib import Path

# Read before polyxla is imported, which could start a process too.
children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()

import polyxla  # noqa: E402


def parent(replica: polyxla.Replica) -> str:
    return str(os.getppid())


if __name__ == "__main__":
    print("RESULT", len(children), children * 2 == polyxla.launch(parent))
