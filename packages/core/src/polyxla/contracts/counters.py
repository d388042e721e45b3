"""A runtime's counters of compilations, executions, reads and memory, for logging and profiling."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Counts(NamedTuple):
    """Totals since the replica's process started; replicas that are threads of one process share them.

    Attributes:
        compiles: programs that this process requested from the compiler or the persistent cache.
        executions: programs submitted to the device.
        host_reads: scalars that the host read (``.item()``, ``if tensor:``) and operations that it executed
            instead of the device; each waits for the device. Copies of whole tensors need not be counted.
        cache_hits: programs found in the persistent cache; 0 without a cache.
        cache_misses: programs that the persistent cache lacked or could not load; 0 without a cache.
    """

    compiles: int = 0
    executions: int = 0
    host_reads: int = 0
    cache_hits: int = 0
    cache_misses: int = 0

    def since(self, before: Counts) -> Counts:
        """Return the difference to the earlier counts `before`."""
        return Counts(*map(operator.sub, self, before))


@dataclass(frozen=True)
class Memory:
    """A device's memory, in bytes; `peak_bytes` is None if the runtime does not record it."""

    used_bytes: int
    limit_bytes: int
    peak_bytes: int | None = None


class Counters(ABC):
    """Reads one replica's counters. Called in the replica's thread; only `settle` waits for the device.

    Attributes:
        chip: the chip's name as its vendor spells it, such as ``TPU v4``; None if it is unknown or the device
            is emulated.
        is_eager: whether a step is many programs, submitted as its lines run, and not one.
    """

    chip: str | None = None
    is_eager: bool = False

    @abstractmethod
    def counts(self) -> Counts:
        """Return the totals. Called after every step, so it must not take more than a few microseconds."""

    def settle(self) -> None:  # noqa: B027 -- a runtime that counts at once has nothing to do
        """Wait until the counts include all that was submitted. Called when something is being compiled."""

    @abstractmethod
    def compile_s(self) -> float:
        """Return the seconds of all compilations, 0 if unknown. Called after each; may take 0.2 ms."""

    @abstractmethod
    def fallbacks(self) -> dict[str, int]:
        """Return how often each operation ran on the host because the device does not support it."""

    @abstractmethod
    def memory(self) -> Memory | None:
        """Return the device's memory; None if the runtime does not report it."""

    def is_submitted(self, tensor: torch.Tensor) -> bool:
        """Return whether the program that computes `tensor` was submitted: a read compiles nothing."""
        return True
