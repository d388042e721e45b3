"""Memory of a device's arrays, counted here because XLA's CPU client has no allocator to query."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class MemoryAccount:
    """Counts the live arrays of one device. Temporary memory of running programs is not counted.

    Args:
        limit_bytes: memory that the device may use.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._in_use = self._peak = self._count = self._largest = 0
        self._lock = threading.Lock()
        self._live: dict[int, _Entry] = {}
        # The garbage collector may free an array anywhere, also in a thread that holds the lock. So `_free`
        # takes no lock: it appends the size here, and the next call that holds the lock subtracts it.
        self._freed: deque[int] = deque()

    def add(self, arrays: list[Any]) -> None:
        """Count new arrays, until they are freed or `take` is called for them."""
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
        """Stop counting an array whose memory was donated to another one."""
        entry = self._live.pop(id(array), None)
        if entry is not None:
            self._freed.append(entry.size)

    def _free(self, entry: Any) -> None:
        # Not called for a donated array: `take` dropped its weak reference, and the callback with it.
        del self._live[entry.key]
        self._freed.append(entry.size)

    def _settle(self) -> None:
        while self._freed:
            self._in_use -= self._freed.popleft()

    def reset_peak(self) -> None:
        """Begin the peak anew at the bytes in use."""
        with self._lock:
            self._settle()
            self._peak = self._in_use

    def stats(self) -> Mapping[str, int]:
        """Return the counters under PJRT's names; all are bytes except ``num_allocs``."""
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
    """Return the memory of this machine, or the limit of its container if that is lower."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(whole, int(text)) if text.isdecimal() else whole
