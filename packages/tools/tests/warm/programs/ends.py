"""Ends in the way that its argument names."""

import os
import signal
import sys
from pathlib import Path

if sys.argv[1] == "raise":
    raise ValueError("as asked")
if sys.argv[1] == "exit":
    sys.exit(3)
if sys.argv[1] == "text":
    # Written when the object is deleted, at the end.
    left = Path("/dev/stdout").open("w")  # noqa: SIM115
    left.write("from a file that was left open\n")
    sys.exit("as asked")
os.kill(os.getpid(), signal.Signals[sys.argv[1]])
