"""Prints three steps, the first when as many hosts have started as the argument says."""

import os
import pathlib
import sys
import time

directory = pathlib.Path(os.environ["POD_TEST"])
(directory / f"{os.environ['NUMBER']}.started").touch()
while len(list(directory.glob("*.started"))) < int(sys.argv[1]):
    time.sleep(0.05)
for number in range(3):
    print(f"step {number}, loss 0.5", flush=True)
    time.sleep(0.5)
