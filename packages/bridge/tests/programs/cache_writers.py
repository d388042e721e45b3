"""Programs of test_cache_folder.py: ``cache_writers.py FUNCTION DIRECTORY``."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

from polyxla_bridge.programs import cache_folder
from polyxla_bridge.programs.cache_folder import CacheFolder


def many_writes(path: Path) -> None:
    cache_folder.SWEEP_BYTES = 1
    folder = CacheFolder(path, 5_000)
    for number in range(200):
        name = f"polyxla-{number % 20}"
        folder.write(name, bytes([number % 20]) * 1_000)
        with contextlib.suppress(FileNotFoundError):
            assert folder.read(name, is_use=True) == bytes([number % 20]) * 1_000


def killed_before_the_rename(path: Path) -> None:
    Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]
    CacheFolder(path).write("polyxla-a", b"all of it")


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
