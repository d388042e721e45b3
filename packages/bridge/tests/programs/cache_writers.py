"""Programs of test_cache_directory.py: ``cache_writers.py FUNCTION DIRECTORY``."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

from polyxla_bridge.programs import cache
from polyxla_bridge.programs.cache import CacheDirectory


def many_writes(path: Path) -> None:
    cache.SWEEP_BYTES = 1
    directory = CacheDirectory(path, 5_000)
    for number in range(200):
        name = f"polyxla-{number % 20}"
        directory.write(name, bytes([number % 20]) * 1_000)
        with contextlib.suppress(FileNotFoundError):
            assert directory.read(name, is_use=True) == bytes([number % 20]) * 1_000


def killed_before_the_rename(path: Path) -> None:
    Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]
    CacheDirectory(path).write("polyxla-a", b"all of it")


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
