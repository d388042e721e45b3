"""Each replica starts a program that imports torch, after it has used its device."""

import subprocess
import sys

import polyxla
from polyxla import Replica

PROGRAM = "import os, torch; print(torch.ones(2).sum().item(), os.environ['TPU_PROCESS_BOUNDS'])"


def start(replica: Replica) -> tuple[int, str]:
    """Return how the program ended, and what it printed."""
    replica.all_gather(replica.ordinal)
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout.strip()


if __name__ == "__main__":
    print(polyxla.launch(start))
