"""Create a file for each replica in DIRECTORY; then each hangs in C, with the GIL held."""

import ctypes
import sys
from pathlib import Path

import polyxla


def train(replica: polyxla.Replica, directory: str) -> None:
    Path(directory, str(replica.ordinal)).touch()
    ctypes.PyDLL(None).sleep(1000)


if __name__ == "__main__":
    polyxla.launch(train, (sys.argv[1],))
