"""Create a file for each replica in DIRECTORY; then one sleeps and the other waits for it."""

import sys
import time
from pathlib import Path

import polyxla


def train(replica: polyxla.Replica, directory: str) -> None:
    replica.barrier()
    Path(directory, str(replica.ordinal)).touch()
    if replica.ordinal == 1:
        time.sleep(1000)
    replica.barrier()


if __name__ == "__main__":
    polyxla.launch(train, (sys.argv[1],))
