"""Prints its process id, then waits; after Ctrl-C it prints that, and exits with 7."""

import os
import sys
import time

try:
    print(os.getpid(), flush=True)
    time.sleep(120)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(7)
