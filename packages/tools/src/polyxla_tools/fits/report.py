"""The result of ``polyxla fits``, as text for 80 columns and as JSON."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from polyxla_tools.fits.collected import CollectedProgram, operation_line
from polyxla_tools.fits.compile_process import Cost
from polyxla_tools.fits.compiling import CompileResult, MemoryPeak
from polyxla_tools.fits.target import TargetTpu

SMALL_BYTES = 1 << 20
"""Programs that need less HBM are counted, not listed."""
LISTED = 12
"""Number of larger programs that are listed; the rest are counted, too."""
COLUMNS = ("HBM", "args", "outputs", "temps", "code", "FLOPs", "bytes", "at least", "compile")
WIDTH = 8


@dataclass(frozen=True)
class CheckedProgram:
    """A program and what libtpu made of it.

    Attributes:
        program: it.
        result: of its compilation.
        text: its HLO without names, if programs are kept.
        failed_at: the line of the operation that libtpu does not compile, if it names one.
    """

    program: CollectedProgram
    result: CompileResult
    text: str = ""
    failed_at: str = ""

    @classmethod
    def of(cls, program: CollectedProgram, result: CompileResult, text: str) -> CheckedProgram:
        """Read the program's file, which is gone when the result is printed."""
        operation = None if result.fits else failed_operation(result.error)
        line = operation_line(program.hlo.read_bytes(), operation) if operation else None
        return cls(program, result, text, line or "")

    @property
    def where(self) -> str:
        """Where the program comes from."""
        return origin(self.program)

    def problem(self, target: TargetTpu) -> str | None:
        """Return why the program does not run on the TPU, in a sentence; None if it does."""
        if self.result.fits:
            return None
        error = self.result.error
        if self.result.is_too_large:
            cost = self.result.cost
            return f"{self.where}: {exceeded(cost, target) if cost else too_large(error, target)}"
        operation = failed_operation(error)
        at = f" at {self.failed_at}" if self.failed_at else ""
        of = f" ({operation}{at})" if operation else ""
        return f"{self.where}: libtpu does not compile the program{of}: {error.strip().splitlines()[0]}"

    def as_json(self, target: TargetTpu) -> dict[str, Any]:
        """Return it as JSON-compatible values."""
        cost = self.result.cost
        return {
            "line": self.program.line,
            "name": self.program.name,
            "operation": self.program.operation,
            "executions": self.program.executions,
            "variants": self.program.variants,
            "fits": self.result.fits,
            "hbm_bytes": cost.total_bytes if cost else None,
            **(dataclasses.asdict(cost) if cost else {}),
            "estimate_s": target.estimate_s(cost) if cost else None,
            "compile_s": round(self.result.seconds, 3),
            "problem": self.problem(target),
            "is_too_large": self.result.is_too_large,
        }


@dataclass(frozen=True)
class CheckedScript:
    """A script's programs, and the most memory that each device needs.

    Attributes:
        programs: the script's.
        peaks: of the devices; not known if a program is too large and the others were not compiled then.
    """

    programs: Sequence[CheckedProgram]
    peaks: Sequence[MemoryPeak] = ()

    def is_too_large(self, target: TargetTpu) -> bool:
        """Return whether a program, or all that is in use while it runs, needs more HBM than a device has."""
        is_full = any(peak.total_bytes > target.memory_bytes for peak in self.peaks)
        return is_full or any(program.result.is_too_large for program in self.programs)

    def fits(self, target: TargetTpu) -> bool:
        """Return whether the script runs on the TPU."""
        return not self.is_too_large(target) and all(program.result.fits for program in self.programs)


def as_json(target: TargetTpu, version: str, script: CheckedScript) -> dict[str, Any]:
    """Return what was found as JSON; ``variants`` counts replicas' programs that are alike."""
    peaks = [
        {
            "device": peak.device,
            "hbm_bytes": peak.total_bytes,
            "arrays_bytes": peak.arrays_bytes,
            "program_bytes": peak.program_bytes,
            "line": peak.program.line,
            "name": peak.program.name,
        }
        for peak in script.peaks
    ]
    return {
        "accelerator": target.name,
        "devices": target.devices,
        "hbm_bytes": target.memory_bytes,
        "libtpu": version,
        "fits": script.fits(target),
        "peaks": peaks,
        "programs": [program.as_json(target) for program in script.programs],
    }


def as_text(target: TargetTpu, version: str, script: CheckedScript) -> Iterator[str]:
    """Yield what was found as lines."""
    devices = f"{target.devices} device{'s' if target.devices > 1 else ''}"
    memory = binary(target.memory_bytes)
    yield f"{target.name}: {devices} with {memory} of HBM each (compiled by libtpu {version})"
    compiled = [checked for checked in script.programs if checked.result.cost is not None]
    # By id, because a program holds dictionaries and so cannot be hashed.
    listed = {
        id(checked) for checked in sorted(compiled, key=_needed)[-LISTED:] if _needed(checked) >= SMALL_BYTES
    }
    if listed:
        yield _row(COLUMNS)
    for checked in compiled:
        if id(checked) in listed:
            times = "once" if checked.program.executions == 1 else f"{checked.program.executions} times"
            yield f"{checked.where}, executed {times}"
            yield _row(_cells(checked, target))
    if smaller := [checked for checked in compiled if id(checked) not in listed]:
        seconds = sum(checked.result.seconds for checked in smaller)
        yield f"{len(smaller)} smaller programs, compiled in {seconds:.1f} s"
    for checked in script.programs:
        if problem := checked.problem(target):
            yield problem
    if script.peaks:
        yield from _peak(target, script)


def _needed(checked: CheckedProgram) -> int:
    return checked.result.cost.total_bytes if checked.result.cost else 0


def _peak(target: TargetTpu, script: CheckedScript) -> Iterator[str]:
    most = max(script.peaks, key=lambda peak: peak.total_bytes)
    # Replicas usually need the same: then the text does not single out a device.
    is_equal = len({peak.total_bytes for peak in script.peaks}) == 1
    on = "" if len(script.peaks) == 1 else " on each device" if is_equal else f" on device {most.device}"
    total, memory = binary(most.total_bytes), binary(target.memory_bytes)
    while_ = f"while {origin(most.program)} runs:"
    if most.total_bytes > target.memory_bytes:
        yield f"does not fit: {total} are needed{on}, and a device has {memory}, {while_}"
    elif script.fits(target):
        yield f"fits: at most {total} of {memory} are needed{on}, {while_}"
    else:
        return
    added = f"{binary(most.program_bytes)} for the program's results, temporary arrays and code"
    yield f"{binary(most.arrays_bytes)} of arrays, and {added}"


def origin(program: CollectedProgram) -> str:
    """Return where a program comes from: a line of the script, and its operation if it has only one."""
    if program.line is None:
        return (
            f"{program.operation} (no line of the script)" if program.operation else "no line of the script"
        )
    return f"{program.line} ({program.operation})" if program.operation else program.line


def _cells(checked: CheckedProgram, target: TargetTpu) -> list[str]:
    cost = checked.result.cost
    assert cost is not None
    estimate = target.estimate_s(cost)
    return [
        binary(cost.total_bytes),
        binary(cost.argument_bytes),
        binary(cost.output_bytes - cost.alias_bytes),
        binary(cost.temporary_bytes),
        binary(cost.code_bytes),
        decimal(cost.flops),
        decimal(cost.accessed_bytes),
        "?" if estimate is None else _time(estimate),
        f"{checked.result.seconds:.1f}s",
    ]


def _time(seconds: float) -> str:
    factor, unit = (1e6, "us") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1, "s")
    return f"{factor * seconds:.3g}{unit}"


def _row(cells: Sequence[str]) -> str:
    return " ".join(f"{cell:>{WIDTH}}" for cell in cells)


def binary(count: float) -> str:
    """Return a number of bytes in three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1024
    return f"{count:.3g}GiB" if count < 1000 else f"{count:.0f}GiB"


def decimal(count: float | None) -> str:
    """Return a number in three digits and a decimal unit; ``?`` if it is not known."""
    if count is None:
        return "?"
    for unit in ("", "K", "M", "G"):
        if count < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}T" if count < 999.5 else f"{count:.0f}T"


def exceeded(cost: Cost, target: TargetTpu) -> str:
    """Return what a program that compiles, but is too large, needs of the HBM, in a sentence."""
    return (
        f"the program needs {binary(cost.total_bytes)} of HBM, and a device has "
        f"{binary(target.memory_bytes)}: its arguments need {binary(cost.argument_bytes)}, its results "
        f"{binary(cost.output_bytes - cost.alias_bytes)} more"
    )


def too_large(error: str, target: TargetTpu) -> str:
    """Return what needs too much HBM, in a sentence, from the error of the compilation.

    Source: libtpu 0.0.21 names the first array that is larger than the HBM, or lists the program's arrays;
        libtpu 0.0.52 has only the sum.
    """
    if match := re.search(r"Allocation \(size=(\d+)\) .*?\[shape = '(\w+\[[\d,]*\])", error):
        return (
            f"an array of the program, {match[2]}, needs {binary(int(match[1]))} of HBM, and a device has "
            f"{binary(target.memory_bytes)}"
        )
    # libtpu 0.0.21 reports the use of HBM in the first form, 0.0.52 in the second.
    used = re.search(r"Used ([\d.]+[KMG]) of ([\d.]+[KMG]) hbm", error) or re.search(
        r"\(([\d.]+[KMG])\) exceeds available HBM \(([\d.]+[KMG])\)", error
    )
    if used is None:
        return f"the program needs more HBM than a device has ({binary(target.memory_bytes)})"
    largest = re.search(r"\b1\. Size: ([\d.]+[KMG])\s+(?:Operator: .*?\s+)?Shape: (\w+\[[\d,]*\])", error)
    of = f"; its largest array, {largest[2]}, needs {largest[1]}iB" if largest else ""
    return f"the program needs {used[1]}iB of HBM, and a device has {used[2]}iB for programs{of}"


def failed_operation(error: str) -> str | None:
    """Return the instruction that an error of libtpu names, such as ``reduce-scatter.33``; None if none."""
    match = re.search(r"%([\w.-]+) = ", error)
    return match[1] if match else None
