"""Memory of a device, counted here because XLA's CPU client has no allocator to query."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from polyxla_bridge.abi import Code
from polyxla_bridge.env import POLYXLA_DEVICE_MEMORY
from polyxla_bridge.errors import PjrtError

FREE_TIMEOUT_S = 1.0
"""Longest wait for arrays that another thread is about to free, before memory is refused, in seconds."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_Array = TypeVar("_Array")


class MemoryNeeds(NamedTuple):
    """Memory that a program needs on one device, in bytes.

    Attributes:
        arguments: size of the arguments.
        results: size of the results that do not reuse an argument's memory.
        temporary: size of the arrays that exist only while the program runs.
    """

    arguments: int
    results: int
    temporary: int

    @classmethod
    def from_xla(cls, stats: Any, results: int) -> MemoryNeeds:
        """Read the statistics of XLA's compiler.

        Args:
            stats: jaxlib's ``CompiledMemoryStats``, or ``PJRT_Executable_GetCompiledMemoryStats_Args``.
            results: number of results.
        """
        # XLA counts a table of pointers for a tuple of results, which the device does not hold.
        table = 8 * results if results > 1 else 0
        return cls(
            stats.argument_size_in_bytes,
            stats.output_size_in_bytes - table - stats.alias_size_in_bytes,
            stats.temp_size_in_bytes,
        )

    @property
    def own(self) -> int:
        """Memory beside the arguments."""
        return self.results + self.temporary


class MemoryAccount:
    """Counts the live arrays of one device, and the temporary arrays of the program that runs on it.

    Args:
        limit_bytes: memory that the device has.
        is_enforced: whether the limit is enforced; otherwise it is only reported.
    """

    def __init__(self, limit_bytes: int, is_enforced: bool = False) -> None:
        self._limit_bytes = limit_bytes
        self._is_enforced = is_enforced
        self._in_use = self._peak = self._count = self._largest = self._reserved = 0
        self._lock = threading.Lock()
        self._live: dict[int, _Entry] = {}
        # The garbage collector may free an array anywhere, also in a thread that holds the lock. So `_free`
        # takes no lock: it appends the size here, and the next call that holds the lock subtracts it.
        self._freed: deque[int] = deque()

    def reserve(self, size: int, what: str) -> None:
        """Reserve memory for an array or a program; call `add` once it exists, or `release` if it has failed.

        Args:
            size: in bytes.
            what: names the array or program in the error.

        Raises:
            PjrtError: the limit is enforced, and less than `size` is free.
        """
        deadline = time.monotonic() + FREE_TIMEOUT_S
        while not self._reserve(size):
            if time.monotonic() > deadline:
                raise PjrtError(
                    Code.RESOURCE_EXHAUSTED,
                    f"{what} needs {size:,} bytes of memory, but of the device's {self._limit_bytes:,} bytes "
                    f"{self._in_use:,} are in use ({POLYXLA_DEVICE_MEMORY} sets the limit)",
                )
            # `_free` may run inside any call, so it cannot wake a thread that waits here.
            time.sleep(0.001)

    def _reserve(self, size: int) -> bool:
        with self._lock:
            self._settle()
            total = self._in_use + self._reserved + size
            if self._is_enforced and total > self._limit_bytes:
                return False
            self._reserved += size
            # The peak includes reserved memory: a program's temporary arrays are never in `_in_use`.
            self._peak = max(self._peak, total)
            return True

    def release(self, size: int) -> None:
        """Release memory that `reserve` has reserved."""
        with self._lock:
            self._reserved -= size

    def make(self, size: int, what: str, make: Callable[[], _Array]) -> _Array:
        """Make an array, and count it.

        Args:
            size: in bytes.
            what: names the array in the error.
            make: makes the array.

        Raises:
            PjrtError: the limit is enforced, and less than `size` is free.
        """
        self.reserve(size, what)
        try:
            array = make()
        except BaseException:
            self.release(size)
            raise
        self.add([array], reserved=size)
        return array

    def check(self, needs: MemoryNeeds, program: str) -> None:
        """Refuse a program that needs more memory than the whole device has.

        Raises:
            PjrtError: the limit is enforced, and the program needs more.
        """
        size = needs.arguments + needs.own
        if self._is_enforced and size > self._limit_bytes:
            raise PjrtError(
                Code.RESOURCE_EXHAUSTED,
                f"program {program} needs {size:,} bytes of memory, but the device has "
                f"{self._limit_bytes:,} bytes ({POLYXLA_DEVICE_MEMORY} sets the limit)",
            )

    def add(self, arrays: list[Any], reserved: int = 0) -> None:
        """Count new arrays, until they are freed or `take` is called for them.

        Args:
            arrays: the arrays.
            reserved: memory that `reserve` has reserved for them, and that is released in the same step:
                between two steps, another thread could reserve what the arrays need.
        """
        with self._lock:
            self._reserved -= reserved
            self._settle()
            for array in arrays:
                size = array.on_device_size_in_bytes()
                # A callback gets only the weak reference, which therefore carries the array's key and size.
                entry = _Entry(array, self._free)
                entry.key, entry.size = id(array), size
                self._live[entry.key] = entry
                self._in_use += size
                self._count += 1
                self._largest = max(self._largest, size)
            self._peak = max(self._peak, self._in_use + self._reserved)

    def take(self, array: Any) -> None:
        """Stop counting an array whose memory was donated to another one."""
        # The object of a donated array may outlive its memory, and would count until its end.
        entry = self._live.pop(id(array), None)
        if entry is not None:
            self._freed.append(entry.size)

    def _free(self, entry: Any) -> None:
        # This never runs for a donated array, because `take` dropped its weak reference with the callback.
        del self._live[entry.key]
        self._freed.append(entry.size)

    def _settle(self) -> None:
        while self._freed:
            self._in_use -= self._freed.popleft()

    def arrays(self) -> list[Any]:
        """Return the live arrays."""
        # Another thread may free an array at any time, so this iterates over a copy of the values.
        with self._lock:
            found = [entry() for entry in list(self._live.values())]
        return [array for array in found if array is not None]

    def reset_peak(self) -> None:
        """Restart the peak at the bytes in use."""
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
    # The file contains "max" if the container has no limit.
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(whole, int(text)) if text.isdecimal() else whole
