"""Prints its process id, then waits; after Ctrl-C it prints that, and exits with 7."""

import os
import sys
import time

print(os.getpid(), flush=True)
try:
    time.sleep(120)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(7)
