"""The most memory that a device needs at one time: for its arrays, and for the program that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from polyxla_bridge.programs.executable import ArrayType
from polyxla_tools.fits.collected import CollectedProgram
from polyxla_tools.fits.plugin_api import Cost


@dataclass(frozen=True)
class MemoryPeak:
    """The moment at which a device needs the most memory.

    Attributes:
        device: its index.
        program: runs then.
        arrays_bytes: memory of all arrays that are alive, the program's arguments included.
        program_bytes: memory that the program adds: its temporary arrays, its code, and its results that do
            not reuse an argument's memory.
    """

    device: int
    program: CollectedProgram
    arrays_bytes: int
    program_bytes: int

    @property
    def total_bytes(self) -> int:
        """Memory of arrays and program."""
        return self.arrays_bytes + self.program_bytes


def memory_peaks(
    programs: Iterable[tuple[CollectedProgram, Cost]], size_of: Callable[[ArrayType], int]
) -> list[MemoryPeak]:
    """Return the peak of each device that has executed one of the programs, by index.

    Args:
        programs: what the devices have executed, with what libtpu says that each needs.
        size_of: returns the memory that an array needs on the TPU.
    """
    found: dict[int, MemoryPeak] = {}
    for program, cost in programs:
        for device, alive in program.alive.items():
            arrays = sum(count * size_of(type_) for type_, count in alive.counts.items())
            peak = MemoryPeak(device, program, arrays, cost.total_bytes - cost.argument_bytes)
            if device not in found or peak.total_bytes > found[device].total_bytes:
                found[device] = peak
    return [found[device] for device in sorted(found)]
