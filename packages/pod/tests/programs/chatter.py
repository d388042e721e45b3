"""Prints more than a pipe holds; then host 0 sleeps, and host 1 fails."""

import os
import pathlib
import sys
import time

file = pathlib.Path(os.environ["POD_TEST"], "0.pid")
for line in range(8000):
    print("x" * 40, line, flush=True)
if os.environ["NUMBER"] == "1":
    while not file.exists():
        time.sleep(0.02)
    sys.exit(3)
new = file.with_suffix(".new")
new.write_text(str(os.getpid()))
new.rename(file)
time.sleep(300)
