"""How much memory a device's arrays take: counted, because XLA's CPU client has no allocator to ask."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class Account:
    """Counts one device's live arrays; what a program needs while it runs is not among them.

    Args:
        limit_bytes: what the device may use.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._in_use = self._peak = self._count = self._largest = 0
        self._lock = threading.Lock()
        self._live: dict[int, _Entry] = {}
        # The collector may free an array anywhere, also where the lock is held: it only leaves a note.
        self._freed: deque[int] = deque()

    def add(self, arrays: list[Any]) -> None:
        """Count new arrays until they are freed, or until they are taken."""
        with self._lock:
            self._settle()
            for array in arrays:
                size = array.on_device_size_in_bytes()
                entry = _Entry(array, self._free)
                entry.key, entry.size = id(array), size
                self._live[entry.key] = entry
                self._in_use += size
                self._count += 1
                self._largest = max(self._largest, size)
            self._peak = max(self._peak, self._in_use)

    def take(self, array: Any) -> None:
        """Count an array no more: its memory went to another one."""
        entry = self._live.pop(id(array), None)
        if entry is not None:
            self._freed.append(entry.size)

    def _free(self, entry: Any) -> None:
        # Of an array that was taken, the entry is gone, and this is not called.
        del self._live[entry.key]
        self._freed.append(entry.size)

    def _settle(self) -> None:
        while self._freed:
            self._in_use -= self._freed.popleft()

    def stats(self) -> Mapping[str, int]:
        """Return the counts under PJRT's names, in bytes but for ``num_allocs``."""
        with self._lock:
            self._settle()
            return {
                "bytes_in_use": self._in_use,
                "peak_bytes_in_use": self._peak,
                "num_allocs": self._count,
                "largest_alloc_size": self._largest,
                "bytes_limit": self._limit_bytes,
            }


class _Entry(weakref.ref[Any]):
    __slots__ = ("key", "size")
    key: int
    size: int


def machine_bytes(limit: Path = _CGROUP_LIMIT) -> int:
    """Return this machine's memory, or what its container may use of it."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(whole, int(text)) if text.isdecimal() else whole
