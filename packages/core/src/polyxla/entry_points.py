"""The entry points of installed distributions, read once for all groups."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from pathlib import Path
from typing import Any


def entry_points(group: str) -> importlib.metadata.EntryPoints:
    """Return a group's entry points, as installed now: an installation changes a directory on the path."""
    # Listing reads a file of every distribution, and a launch asks for several groups. The modification times
    # are the key, because a notebook may install a package after its first launch.
    everything = _all(tuple((entry, _changed(entry)) for entry in sys.path))
    found: importlib.metadata.EntryPoints = everything.select(group=group)
    return found


@functools.lru_cache(maxsize=1)
def _all(path: tuple[tuple[str, int], ...]) -> Any:
    # Any, because the type changed in Python 3.12.
    return importlib.metadata.entry_points()


def _changed(directory: str) -> int:
    try:
        return Path(directory).stat().st_mtime_ns
    except OSError:
        return 0
