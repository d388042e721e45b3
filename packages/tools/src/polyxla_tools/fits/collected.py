"""The programs of an emulated run, from the records of the emulated libtpu, and the script's lines."""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyxla.plugin import LIBRARIES, own_packages, short
from polyxla_bridge.programs import hlo, recording
from polyxla_bridge.programs.executable import ArrayType

Frame = tuple[str, int]
"""A file and a line."""
OPERATION = "tt_jit_"
"""Starts the name of a program that computes one operation. Source: seen with torch_tpu 0.2.0."""


def innermost_user_line(stack: Iterable[Frame]) -> str | None:
    """Return ``file:line`` of the first frame that belongs to no library; None if all do."""
    return next((show(frame) for frame in stack if is_users(frame[0])), None)


def program_line(module: bytes) -> str | None:
    """Return ``file:line`` of the script from which most of a program's operations come.

    Of a stack's lines in the script, it is the outermost: the line of a training step, not of a layer.

    Args:
        module: a serialised HloModuleProto, with stacks in its metadata (``XLA_IR_DEBUG=1``).
    """
    lines = Counter(outermost for stack in hlo.stacks(module).values() if (outermost := _outermost(stack)))
    return lines.most_common(1)[0][0] if lines else None


def operation_line(module: bytes, instruction: str) -> str | None:
    """Return ``file:line`` of the script that an instruction comes from; None if it is not known."""
    return innermost_user_line(hlo.stacks(module).get(instruction, ()))


def _outermost(stack: list[Frame]) -> str | None:
    users = [frame for frame in stack if is_users(frame[0])]
    return show(users[-1]) if users else None


# Stacks repeat the same few files, and each is compared with every entry of `sys.path`.
@functools.cache
def is_users(file: str) -> bool:
    """Return whether a file belongs to neither Python nor a library between the script and the device."""
    if file.startswith("<") or not file:
        return False
    package = next(_packages(file), "")
    return package not in LIBRARIES and package not in own_packages()


def _packages(file: str) -> Iterator[str]:
    """Yield the top-level package of a file, by the longest import path that contains it."""
    # Start with the longest entry, because site-packages is often below another one.
    for entry in sorted(filter(None, sys.path), key=len, reverse=True):
        if Path(file).is_relative_to(entry):
            yield Path(file).relative_to(entry).parts[0].removesuffix(".py")


def show(frame: Frame) -> str:
    """Return ``file:line``, with the path relative to the working directory if the file is below it."""
    file, line = frame
    return f"{short(file)}:{line}"


@dataclass(frozen=True)
class Alive:
    """The arrays of a device just before it executes a program, the program's arguments included.

    Attributes:
        in_use_bytes: without what a TPU adds to fill tiles.
        counts: number of the arrays, by type.
    """

    in_use_bytes: int
    counts: Mapping[ArrayType, int]


@dataclass(frozen=True)
class CollectedProgram:
    """A program and what is known of it without compiling it.

    Attributes:
        fingerprint: names its files.
        name: of its HLO module.
        line: ``file:line`` of the script that ran it; None if no line is known.
        operation: the operation that it computes, if the framework names programs after them.
        executions: how often a device has executed it, the one that did most often.
        variants: number of programs of the same structure, one for each process, that it stands for.
        hlo: the file of its serialised HloModuleProto.
        options: the file of its serialised CompileOptionsProto.
        alive: the most arrays with which each device has executed it, by the device's index.
    """

    fingerprint: str
    name: str
    line: str | None
    operation: str | None
    executions: int
    variants: int
    hlo: Path
    options: Path
    alive: Mapping[int, Alive] = field(default_factory=dict)


class Logs:
    """The logs of a run's processes, read further at each call.

    Args:
        directory: what the emulated libtpu records in.

    Attributes:
        asked: the fingerprints of the programs that each process has compiled, in order.
        executions: number of executions, by fingerprint, process and device.
        stacks: the calls that led to each program, by fingerprint.
        mains: the main thread's calls at that time, if another thread asked, by fingerprint.
        alive: the most arrays with which each device has executed a program, by fingerprint and device.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}
        self._quiet: dict[Path, Counter[Any]] = {}
        self.asked: dict[Path, list[str]] = {}
        self.executions: Counter[tuple[str, str, int]] = Counter()
        self.stacks: dict[str, list[Frame]] = {}
        self.mains: dict[str, list[Frame]] = {}
        self.alive: dict[tuple[str, int], Alive] = {}

    def read(self) -> bool:
        """Read what the processes have written since the last call; return whether a program is new."""
        count = sum(map(len, self.asked.values()))
        # Sorted, because the order of the processes decides in which order the programs are listed.
        for path in sorted(self._directory.glob(f"*{recording.LOG}")):
            quiet = self._quiet.setdefault(path, Counter())
            for line in self._new_lines(path):
                if "compiled" in line:
                    self._compiled(path, line)
                    # The steps without a new program are counted from here on again.
                    quiet.clear()
                else:
                    quiet[line["executed"], line["device"]] += 1
                    self._executed(path, line)
        return sum(map(len, self.asked.values())) > count

    def _compiled(self, path: Path, line: Mapping[str, Any]) -> None:
        fingerprint = line["compiled"]
        self.stacks.setdefault(fingerprint, [(file, at) for file, at in line["stack"]])
        self.mains.setdefault(fingerprint, [(file, at) for file, at in line.get("main", ())])
        self.asked.setdefault(path, []).append(fingerprint)

    def _executed(self, path: Path, line: Mapping[str, Any]) -> None:
        fingerprint, device = line["executed"], line["device"]
        self.executions[fingerprint, path.name, device] += 1
        # The emulated libtpu records a list only if it has more bytes than the previous list.
        if "arrays" in line:
            counts = {ArrayType(dtype, tuple(dims)): count for dtype, dims, count in line["arrays"]}
            self.alive[fingerprint, device] = Alive(line["in_use"], counts)

    def _new_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            text = file.read()
        # The process may be writing the last line: it is read again when it is complete.
        whole = text[: text.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        return (json.loads(line) for line in whole.splitlines())

    @property
    def repeats(self) -> int:
        """How often a program was executed since the last new one, in the process that is furthest behind."""
        # The slowest process decides: stopped earlier, its programs would be missing.
        return min((max(quiet.values(), default=0) for quiet in self._quiet.values()), default=0)


def programs(directory: Path, logs: Logs) -> list[CollectedProgram]:
    """Return the distinct programs in the order of the first requests for them.

    Processes that have asked for programs of the same structure, which differ in numbers such as the place of
    a replica's share, count as processes with the same program.
    """
    structures = {
        fingerprint: hlo.structure(_module(directory, fingerprint).read_bytes())
        for fingerprint in logs.stacks
    }
    # Replicas compile programs that differ in constants, such as a replica's offset. They count as one
    # program.
    kinds: dict[tuple[bytes, int], list[str]] = {}
    known: set[str] = set()
    for asked in logs.asked.values():
        seen: Counter[bytes] = Counter()
        for fingerprint in asked:
            # The n-th program of a structure in one process corresponds to the n-th in each other process.
            alike = structures[fingerprint]
            if fingerprint not in known:
                kinds.setdefault((alike, seen[alike]), []).append(fingerprint)
                known.add(fingerprint)
            seen[alike] += 1
    return [_program(directory, logs, alike) for alike in kinds.values()]


def _module(directory: Path, fingerprint: str) -> Path:
    return directory / f"{fingerprint}{recording.HLO}"


def _program(directory: Path, logs: Logs, alike: list[str]) -> CollectedProgram:
    first = alike[0]
    path = _module(directory, first)
    module = path.read_bytes()
    counts: Counter[tuple[str, int]] = Counter()
    for (fingerprint, process, device), count in logs.executions.items():
        if fingerprint in alike:
            counts[process, device] += count
    name = hlo.module_name(module)
    return CollectedProgram(
        fingerprint=first,
        name=name,
        line=(
            # The stack at compilation is exact. Without one, the metadata of operations tell, then the main
            # thread.
            innermost_user_line(logs.stacks[first])
            or program_line(module)
            or innermost_user_line(logs.mains[first])
        ),
        operation=name.removeprefix(OPERATION) if name.startswith(OPERATION) else None,
        # The script may have been stopped when one device was a step ahead of the others.
        executions=max(counts.values(), default=0),
        variants=len(alike),
        hlo=path,
        options=directory / f"{first}{recording.OPTIONS}",
        alive=_most(logs, alike),
    )


def _most(logs: Logs, alike: list[str]) -> dict[int, Alive]:
    found: dict[int, Alive] = {}
    for (fingerprint, device), alive in logs.alive.items():
        if fingerprint in alike and (device not in found or alive.in_use_bytes > found[device].in_use_bytes):
            found[device] = alive
    return found
