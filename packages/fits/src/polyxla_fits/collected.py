"""The programs that a script's emulated run has asked for, read from what the played libtpu has recorded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyxla_bridge.programs import hlo, recording
from polyxla_fits.source_lines import innermost_user_line, program_line


@dataclass(frozen=True)
class CollectedProgram:
    """A program and what is known of it without compiling it.

    Attributes:
        fingerprint: names its files.
        name: of its HLO module.
        line: ``file:line`` of the script that ran it; None if no line is known.
        executions: how often a device has executed it, the one that did most often.
        variants: number of programs of the same structure, one for each process, that it stands for.
        hlo: the file of its serialised HloModuleProto.
        options: the file of its serialised CompileOptionsProto.
    """

    fingerprint: str
    name: str
    line: str | None
    executions: int
    variants: int
    hlo: Path
    options: Path


class Logs:
    """The logs of a run's processes, read further at each call.

    Args:
        directory: what the played libtpu records in.

    Attributes:
        asked: the fingerprints of the programs that each process has compiled, in order.
        executions: number of executions, by fingerprint, process and device.
        stacks: the calls that led to each program, by fingerprint.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}
        self._quiet: dict[Path, Counter[Any]] = {}
        self.asked: dict[Path, list[str]] = {}
        self.executions: Counter[tuple[str, str, int]] = Counter()
        self.stacks: dict[str, list[tuple[str, int]]] = {}

    def read(self) -> None:
        """Read what the processes have written since the last call."""
        for path in sorted(self._directory.glob(f"*{recording.LOG}")):
            quiet = self._quiet.setdefault(path, Counter())
            for line in self._new_lines(path):
                if "compiled" in line:
                    self.stacks.setdefault(line["compiled"], [(file, at) for file, at in line["stack"]])
                    self.asked.setdefault(path, []).append(line["compiled"])
                    quiet.clear()
                else:
                    quiet[line["executed"], line["device"]] += 1
                    self.executions[line["executed"], path.name, line["device"]] += 1

    def _new_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            text = file.read()
        # The last line may not be complete yet.
        whole = text[: text.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        return (json.loads(line) for line in whole.splitlines())

    @property
    def repeats(self) -> int:
        """How often a program was executed since the last new one, in the process that is furthest behind."""
        return min((max(quiet.values(), default=0) for quiet in self._quiet.values()), default=0)


def programs(directory: Path, logs: Logs) -> list[CollectedProgram]:
    """Return the distinct programs in the order in which a process has first asked for them.

    Processes that have asked for programs of the same structure, which differ in numbers such as the place of
    a replica's share, count as processes with the same program.
    """
    structures = {one: hlo.structure(_module(directory, one).read_bytes()) for one in logs.stacks}
    kinds: dict[tuple[bytes, int], list[str]] = {}
    known: set[str] = set()
    for asked in logs.asked.values():
        seen: Counter[bytes] = Counter()
        for fingerprint in asked:
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
    return CollectedProgram(
        fingerprint=first,
        name=hlo.module_name(module),
        line=innermost_user_line(logs.stacks[first]) or program_line(module),
        executions=max(counts.values(), default=0),
        variants=len(alike),
        hlo=path,
        options=directory / f"{first}{recording.OPTIONS}",
    )
