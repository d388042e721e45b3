"""End while the background writer is at work, after a forked child has written too. Argument: the file."""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any

from polyxla_training.checkpoint import BackgroundWriter, save

writer = BackgroundWriter()


def save_slowly(state: Any) -> None:
    time.sleep(0.2)
    save(state, sys.argv[1])


writer.submit(save_slowly, ["of the parent"])
pid = os.fork()
if pid == 0:
    writer.submit(functools.partial(save, path=sys.argv[1] + "-child"), ["of the child"])
    writer.close()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
