"""Save until killed. Argument: the file.

Imports torch once; for each line that it reads, a number, it forks a process that saves from that step on.
"""

from __future__ import annotations

import itertools
import os
import sys

import torch

from polyxla_training.checkpoint import save

torch.set_num_threads(1)
save({"warm": torch.zeros(1)}, sys.argv[1] + "-warm")
os.write(1, b"ready\n")
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        for step in itertools.count(int(line)):
            save({"step": step, "parts": [torch.full((2**18,), step) for _ in range(4)]}, sys.argv[1])
            os.write(1, b"saved %d\n" % step)
    os.write(1, b"pid %d\n" % pid)
    os.waitpid(pid, 0)
    os.write(1, b"ended 0\n")
