"""Compiling programs with libtpu in a process of its own, and the most memory that a device needs."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from polyxla import PolyxlaError
from polyxla.plugin import signal_name, tpu_env
from polyxla_bridge.abi import Code, width
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.executable import ArrayType
from polyxla_tools.fits import compile_process
from polyxla_tools.fits.collected import CollectedProgram
from polyxla_tools.fits.compile_process import Cost
from polyxla_tools.fits.target import TargetTpu

START_TIMEOUT_S = 60.0
"""Longest wait for libtpu to load, in seconds; it takes less than one."""


@dataclass(frozen=True)
class CompileResult:
    """What libtpu made of a program.

    Attributes:
        seconds: for which libtpu has compiled.
        cost: what the program needs; None if it did not compile.
        error: why it did not compile, in libtpu's words.
        is_too_large: whether it needs more HBM than a device has. libtpu compiles such a program if only its
            results are too large.
    """

    seconds: float
    cost: Cost | None = None
    error: str = ""
    is_too_large: bool = False

    @property
    def fits(self) -> bool:
        """Whether a device can run the program."""
        return self.cost is not None and not self.is_too_large


class CompileFailedError(PolyxlaError):
    """libtpu cannot be used: it does not load, or does not know the TPU."""


class CompileProcess:
    """A process that compiles, started again after libtpu has ended it. Use as a context manager.

    Args:
        library: libtpu's path.
        target: the TPU.
        environ: of this process.
    """

    def __init__(self, library: Path, target: TargetTpu, environ: Mapping[str, str]) -> None:
        self._memory_bytes = target.memory_bytes
        arguments = [str(library), target.topology, json.dumps(target.options)]
        self._command = [sys.executable, "-m", compile_process.__name__, *arguments]
        # With these variables libtpu would look for this machine's TPU and ask the metadata server.
        of_this_tpu = ("TPU_", "CLOUD_TPU_", "MEGASCALE_")
        others = {name: value for name, value in environ.items() if not name.startswith(of_this_tpu)}
        self._environ = {
            **others,
            tpu_env.TPU_SKIP_MDS_QUERY: "1",
            tpu_env.TPU_WORKER_HOSTNAMES: "localhost",
            # Otherwise libtpu's lock file refuses a second process on this machine, even to compile.
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
        self._process: subprocess.Popen[str] | None = None
        self._sizes: dict[ArrayType, int] = {}
        self._errors: IO[str]

    def __enter__(self) -> Self:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._errors.close()

    def compile(self, program: CollectedProgram, timeout_s: float) -> CompileResult:
        """Compile a program; wait at most `timeout_s` seconds.

        Raises:
            CompileFailedError: libtpu does not load, or does not know the TPU.
        """
        started = time.monotonic()
        answer = self._compile(program.hlo, program.options, timeout_s)
        seconds = time.monotonic() - started
        if answer is None:
            # The timer has killed the process, or libtpu has ended it: only the time tells them apart.
            is_late = seconds >= timeout_s
            reason = f"libtpu took longer than {timeout_s:.0f} s" if is_late else self._end_of_process()
            self._end()
            return CompileResult(seconds, error=reason)
        if "error" in answer:
            return CompileResult(
                answer["seconds"],
                error=answer["error"],
                is_too_large=answer["code"] == Code.RESOURCE_EXHAUSTED,
            )
        cost = Cost(**answer["cost"])
        return CompileResult(answer["seconds"], cost, is_too_large=cost.total_bytes > self._memory_bytes)

    def size_of(self, type_: ArrayType, options: Path, timeout_s: float) -> int:
        """Return the memory that an array needs on the TPU, where it fills whole tiles.

        Args:
            type_: the array's.
            options: the file of any program's serialised CompileOptionsProto.
            timeout_s: longest wait, in seconds, for a type that was not asked for before.

        Raises:
            CompileFailedError: libtpu does not load, or does not know the TPU.
        """
        # A training has many arrays of few types, and each type takes a compilation.
        if type_ not in self._sizes:
            with tempfile.NamedTemporaryFile(suffix=".hlo") as file:
                file.write(hlo.holder(type_.dtype, type_.dims))
                file.flush()
                answer = self._compile(Path(file.name), options, timeout_s)
            if answer is None:
                self._end()
            # libtpu does not compile a program whose argument is larger than the HBM: estimate it unpadded.
            is_known = answer is not None and "cost" in answer
            size = Cost(**answer["cost"]).argument_bytes if answer and is_known else _host_size(type_)
            self._sizes[type_] = size
        return self._sizes[type_]

    def _compile(self, module: Path, options: Path, timeout_s: float) -> dict[str, Any] | None:
        # This is the first program, or the first one after libtpu has ended its process.
        if self._process is None:
            self._start()
        return self._ask([str(module), str(options)], timeout_s)

    def _start(self) -> None:
        # The log of an earlier process must not explain the end of this one.
        self._errors.seek(0)
        self._errors.truncate()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=self._environ,
            text=True,
        )
        first = self._ask(None, START_TIMEOUT_S)
        if first is None or "error" in first:
            reason = first["error"] if first else self._end_of_process()
            self._end()
            raise CompileFailedError(f"libtpu cannot compile for {self._command[-2]}: {reason}")

    def _ask(self, request: list[str] | None, timeout_s: float) -> dict[str, Any] | None:
        """Send a request, if any, and return the answer; None if the process has ended or takes too long."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        # `readline` has no timeout, but it returns when the process has ended.
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        try:
            if request is not None:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            # The process has ended after its last answer. The caller asks for its exit code.
            line = ""
        finally:
            timer.cancel()
        answer: dict[str, Any] | None = json.loads(line) if line else None
        return answer

    def _end_of_process(self) -> str:
        assert self._process is not None
        code = self._process.wait(START_TIMEOUT_S)
        how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
        self._errors.seek(0)
        return f"libtpu's process {how}: {fatal_line(self._errors.read())}"

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            # This reads what is left in the pipes and closes them; the process is dead.
            self._process.communicate()
            self._process = None


def _host_size(type_: ArrayType) -> int:
    return math.prod(type_.dims) * width(type_.dtype)


def fatal_line(log: str) -> str:
    """Return why libtpu has ended its process: the text of its fatal line, else its last line.

    Source: the format is abseil's, ``F1123 05:22:07.685228 10092 file.cc:89] text``.
    """
    # A stack trace follows the fatal line, so the last line alone explains nothing.
    fatal = re.findall(r"^F\d{4} [^\]]*\] (.*)", log, re.MULTILINE)
    lines = log.strip().splitlines()
    return str(fatal[0]) if fatal else lines[-1] if lines else "it printed nothing"


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
            # Equal programs run with different arrays alive; the emulated libtpu has kept the largest set.
            arrays = sum(count * size_of(type_) for type_, count in alive.counts.items())
            peak = MemoryPeak(device, program, arrays, cost.total_bytes - cost.argument_bytes)
            if device not in found or peak.total_bytes > found[device].total_bytes:
                found[device] = peak
    return [found[device] for device in sorted(found)]
