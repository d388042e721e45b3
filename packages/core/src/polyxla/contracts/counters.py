"""What a runtime counts while it works: the numbers behind compile lines, sync warnings and reports."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple


class Counts(NamedTuple):
    """Totals since the replica's process started; replicas that are its threads share them.

    Attributes:
        compiles: programs that this process had to have compiled; a persistent cache below may have had them.
        executions: programs that were handed to the device.
        host_reads: scalars that the host read (``.item()``, ``if tensor:``) and operations that it carried
            out in the device's place; each waits for the device. Copies of whole tensors need not be counted.
        cache_hits: programs that the persistent cache had.
        cache_misses: programs that it did not have, or could not load; both are 0 where there is no cache.
    """

    compiles: int = 0
    executions: int = 0
    host_reads: int = 0
    cache_hits: int = 0
    cache_misses: int = 0

    def since(self, before: Counts) -> Counts:
        """Return what was counted after `before`."""
        return Counts(*map(operator.sub, self, before))


@dataclass(frozen=True)
class Memory:
    """A device's memory, in bytes; `peak_bytes` is None where nobody keeps it."""

    used_bytes: int
    limit_bytes: int
    peak_bytes: int | None = None


class Counters(ABC):
    """Reads one replica's counters. Called in the replica's thread; nothing here waits for the device.

    Attributes:
        chip: the kind of chip as its maker spells it, such as ``TPU v4``; None where that is not known, also
            where the device only pretends to be one.
    """

    chip: str | None = None

    @abstractmethod
    def counts(self) -> Counts:
        """Return the totals. Called after every step, so it takes a few microseconds at most."""

    @abstractmethod
    def compile_s(self) -> float:
        """Return the seconds that all compilations took; called after one, and may take 0.2 ms."""

    @abstractmethod
    def fallbacks(self) -> dict[str, int]:
        """Return how often each operation ran on the host because the device has no form of it."""

    @abstractmethod
    def memory(self) -> Memory | None:
        """Return the device's memory; None where the runtime does not tell."""
