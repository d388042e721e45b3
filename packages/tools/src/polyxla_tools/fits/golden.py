"""A script's programs as text, which are kept: a later run shows what has changed in them."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyxla import UsageError
from polyxla_tools.fits.report import CheckedProgram, CheckedScript, binary, decimal
from polyxla_tools.fits.target import TargetTpu

LIST = "programs.json"
"""The file that lists the programs, and what libtpu says of each."""
SHOWN = 60
"""Most lines of a program's difference that are printed."""
NUMBERS = {
    "total_bytes": ("HBM", binary),
    "argument_bytes": ("arguments", binary),
    "output_bytes": ("outputs", binary),
    "temporary_bytes": ("temporary arrays", binary),
    "flops": ("FLOPs", decimal),
    "accessed_bytes": ("bytes", decimal),
}
"""What is kept of a program's cost, and how it is shown."""


@dataclass(frozen=True)
class GoldenProgram:
    """A program.

    Attributes:
        text: its HLO, without names and places in the script.
        numbers: those of `NUMBERS`; without those of libtpu if it did not compile.
    """

    text: str
    numbers: dict[str, float | None]


@dataclass(frozen=True)
class Golden:
    """The programs of a script.

    Attributes:
        accelerator: for which they were compiled.
        libtpu: the version that compiled them.
        programs: in the order of the first requests for them.
    """

    accelerator: str
    libtpu: str
    programs: Sequence[GoldenProgram]

    @classmethod
    def of(cls, script: CheckedScript, target: TargetTpu, libtpu: str) -> Golden:
        """Return the programs of a script that was checked."""
        programs = [GoldenProgram(checked.text, _numbers(checked)) for checked in script.programs]
        return cls(target.name, libtpu, programs)

    @classmethod
    def read(cls, directory: Path) -> Golden | None:
        """Read what `write` wrote; None if nothing is there.

        Raises:
            UsageError: it is something else.
        """
        try:
            document = json.loads((directory / LIST).read_text())
            programs = [
                GoldenProgram((directory / entry["file"]).read_text(), entry["numbers"])
                for entry in document["programs"]
            ]
            return cls(document["accelerator"], document["libtpu"], programs)
        except FileNotFoundError as error:
            if error.filename == str(directory / LIST):
                return None
            problem: Exception = error
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = error
        raise UsageError(
            f"the programs of an earlier run cannot be read: {problem}",
            where=f"--golden {directory}",
            fix="Restore the directory from your repository, or name another one.",
        ) from problem

    def write(self, directory: Path) -> None:
        """Write the programs, in place of those that are there."""
        directory.mkdir(parents=True, exist_ok=True)
        files = [f"{number:03d}.hlo" for number in range(1, len(self.programs) + 1)]
        for file, program in zip(files, self.programs, strict=True):
            (directory / file).write_text(program.text)
        document = {
            "accelerator": self.accelerator,
            "libtpu": self.libtpu,
            "programs": [
                {"file": file, "numbers": program.numbers}
                for file, program in zip(files, self.programs, strict=True)
            ],
        }
        (directory / LIST).write_text(json.dumps(document, indent=2) + "\n")
        for left in directory.glob("[0-9][0-9][0-9].hlo"):
            if left.name not in files:
                left.unlink()

    def changes(self, later: Golden) -> Iterator[str]:
        """Yield in lines what is different in a later run; nothing if it is the same."""
        for what in ("accelerator", "libtpu"):
            before, after = getattr(self, what), getattr(later, what)
            if before != after:
                yield f"{what}: {before} -> {after}"
        texts, later_texts = ([program.text for program in run.programs] for run in (self, later))
        matcher = difflib.SequenceMatcher(None, texts, later_texts, autojunk=False)
        for _, first, end, later_first, later_end in matcher.get_opcodes():
            before, after = self.programs[first:end], later.programs[later_first:later_end]
            for index in range(max(len(before), len(after))):
                if index >= len(after):
                    yield f"program {first + index + 1} is gone: {_summary(before[index])}"
                elif index >= len(before):
                    yield f"program {later_first + index + 1} is new: {_summary(after[index])}"
                else:
                    yield from _change(later_first + index + 1, before[index], after[index])


def canonical(module: bytes) -> str:
    """Return a serialised HloModuleProto as text, without names and places in the script.

    It is HLO, because StableHLO has no form for some instructions of the frameworks.
    """
    # Only a run that keeps its programs needs this.
    from jaxlib._hlo import HloModule, HloPrintOptions  # type: ignore[import-not-found]

    options = HloPrintOptions.canonical()
    options.print_large_constants = False
    options.print_metadata = False
    text: str = HloModule.from_serialized_hlo_module_proto(module).to_string(options)
    text = re.sub(r"^HloModule [^,\n]*", "HloModule program", text)
    # The numbers in the names of computations count all programs of the process.
    return re.sub(r"^((?:ENTRY )?\w+)(?:\.\d+)+ \{$", r"\1 {", text, flags=re.MULTILINE).rstrip() + "\n"


def _numbers(checked: CheckedProgram) -> dict[str, float | None]:
    # How often a program ran until the script was stopped is chance, and not kept.
    cost = checked.result.cost
    if cost is None:
        return {}
    every = {**dataclasses.asdict(cost), "total_bytes": cost.total_bytes}
    return {name: every[name] for name in NUMBERS}


def _summary(program: GoldenProgram) -> str:
    needed, flops = (program.numbers.get(name) for name in ("total_bytes", "flops"))
    hbm = "not compiled" if needed is None else f"{binary(needed)} of HBM, {decimal(flops)} FLOPs"
    return f"{hbm}, {len(program.text.splitlines())} lines"


def _change(number: int, before: GoldenProgram, after: GoldenProgram) -> Iterator[str]:
    shown = [
        f"{label} {_shown(name, before)} -> {_shown(name, after)}"
        for name, (label, _) in NUMBERS.items()
        if before.numbers.get(name) != after.numbers.get(name)
    ]
    if before == after:
        return
    yield f"program {number}: {', '.join(shown) or 'its instructions changed'}"
    difference = difflib.unified_diff(
        before.text.splitlines(), after.text.splitlines(), "before", "after", lineterm="", n=2
    )
    lines = list(difference)
    yield from lines[:SHOWN]
    if len(lines) > SHOWN:
        yield f"... and {len(lines) - SHOWN} more lines"


def _shown(name: str, program: GoldenProgram) -> str:
    value = program.numbers.get(name)
    return "?" if value is None else NUMBERS[name][1](value)
