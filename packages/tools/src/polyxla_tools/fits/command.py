"""``polyxla fits``: whether a script's programs fit a TPU, without one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyxla import PolyxlaError, UsageError
from polyxla.plugin import JsonFlag, pip_install, plain_errors, print_json, say, snapshot

if TYPE_CHECKING:
    from polyxla_bridge.programs.executable import ArrayType
    from polyxla_tools.fits.golden import Golden
    from polyxla_tools.fits.report import CheckedScript
    from polyxla_tools.fits.target import Framework, TargetTpu

TOO_LARGE = 3
"""Exit code if a program, with all arrays of the script, needs more HBM than a device has."""
CHANGED = 4
"""Exit code if the script's programs are not those that `--golden` keeps."""
PLACE = "{}"
"""Placeholder for the batch size in the script's arguments."""
TILE = 8
"""Above it, batch sizes are multiples of it: HBM holds arrays in tiles of 8 rows.
Source: "Cloud TPU performance guide", Cloud TPU documentation."""


class TimeLimitError(PolyxlaError):
    """The command took longer than its limit."""


class CannotCompileError(PolyxlaError):
    """A program does not compile for the TPU, whatever the batch size is."""


def fits(
    command: Annotated[
        list[str], typer.Argument(metavar="(SCRIPT | -m MODULE) [ARGS]...", show_default=False)
    ],
    on: Annotated[str, typer.Option("--on", metavar="TYPE", help="Type of the TPU, such as v5e-8.")],
    steps: Annotated[
        int,
        typer.Option(
            min=0, help="Stop the script after this many steps in a row without a new program; 0: never."
        ),
    ] = 10,
    find_batch: Annotated[
        int | None,
        typer.Option(metavar="FIRST", min=1, help=f"Find the largest batch size, written {PLACE} in ARGS."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="Longest time for everything.")
    ] = 3600,
    golden: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the programs as text here; later, print what has changed."),
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Replace what --golden keeps.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Find out without a TPU whether a script fits one, and how fast it can be there.

    Trains a few steps on an emulated TPU, and compiles each program for the real one with libtpu. Options
    that are not listed here are the script's; after --, all are. Exit code 3: it needs too much HBM;
    4: its programs are not those of --golden.
    """
    # SystemExit unwinds the run's context managers, as KeyboardInterrupt does, so no process is left.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with plain_errors(as_json):
        check_golden(golden, update, find_batch)
        with status_line() as status:
            checker = ScriptChecker.prepare(on, steps, timeout, status, golden)
            if find_batch is None:
                script, largest = checker.check(command), None
            else:
                script, largest = checker.find_batch(command, find_batch)
        raise typer.Exit(finish(checker, script, largest, as_json, update=update))


def check_golden(golden: Path | None, update: bool, find_batch: int | None) -> None:
    """Check the options that keep programs.

    Raises:
        UsageError: they do not go together, or the directory is a file.
    """
    if update and golden is None:
        raise UsageError("--update has nothing to replace", where="--update", fix="Add --golden DIR.")
    if golden is not None and find_batch is not None:
        raise UsageError(
            "--golden keeps the programs of one batch size, and --find-batch tries several",
            where=f"--golden {golden}",
            fix="Leave one of them out.",
        )
    if golden is not None and golden.exists() and not golden.is_dir():
        raise UsageError(f"{golden} is no directory", where=f"--golden {golden}", fix="Name another one.")


def finish(
    checker: ScriptChecker,
    script: CheckedScript,
    largest: int | None,
    as_json: bool,
    *,
    update: bool = False,
) -> int:
    """Print whether the script fits and what has changed, and return the exit code."""
    # Imported here, because it needs the bridge, whose absence `prepare` reports first.
    from polyxla_tools.fits import report

    changes = checker.compare(script, update=update)
    if as_json:
        document = report.as_json(checker.target, checker.version, script)
        found = {"largest_batch": largest, "changes": changes}
        print_json(document | {name: value for name, value in found.items() if value is not None})
    else:
        for line in report.as_text(checker.target, checker.version, script):
            typer.echo(line)
        if largest is not None:
            typer.echo(f"largest batch that fits: {largest}" if largest else "no batch fits, not even 1")
        for line in changes or ():
            typer.echo(line)
    if script.is_too_large(checker.target):
        return TOO_LARGE
    if not script.fits(checker.target):
        return 1
    return CHANGED if changes and not update else 0


@dataclass(frozen=True)
class ScriptChecker:
    """Checks scripts of one framework for one TPU, until its time is over.

    Attributes:
        framework: the script's.
        target: the TPU.
        library: libtpu's path.
        version: libtpu's.
        steps: how many steps in a row must bring no new program.
        end: when the time is over, on the monotonic clock.
        environ: this process's.
        status: shows what is being done.
        golden: the directory in which programs are kept as text; None for none.
        before: what it keeps already; None for nothing.
    """

    framework: Framework
    target: TargetTpu
    library: Path
    version: str
    steps: int
    end: float
    environ: Mapping[str, str]
    status: StatusLine
    golden: Path | None = None
    before: Golden | None = None

    @classmethod
    def prepare(
        cls, on: str, steps: int, timeout_s: float, status: StatusLine, golden: Path | None = None
    ) -> ScriptChecker:
        """Check all that can be checked before the script runs.

        Raises:
            UsageError: there is no such TPU, the framework or its libtpu is missing, or `golden` is damaged.
        """
        if importlib.util.find_spec("polyxla_bridge") is None:
            raise UsageError(
                "the script runs on an emulated TPU, which needs polyxla-bridge, and it is not installed",
                where="polyxla fits",
                fix=f"Install it: {pip_install('polyxla-bridge')}",
            )
        # These modules import the bridge, so its absence is reported before.
        from polyxla_tools.fits.golden import Golden
        from polyxla_tools.fits.target import TargetTpu, installed_framework

        framework = installed_framework()
        target, environ = TargetTpu.parse(on, framework), snapshot()
        # Only another process may load libtpu, which ends its process on a fatal error.
        found = importlib.util.find_spec("libtpu")
        if found is None or found.origin is None:
            raise UsageError(
                "libtpu compiles the programs, and is not installed",
                where="polyxla fits",
                fix=framework.libtpu.fix,
            )
        # The library that TPU_LIBRARY_PATH names is not used: it may be an emulated one.
        if problem := framework.libtpu.problem({}):
            raise UsageError(problem, where="polyxla fits", fix=framework.libtpu.fix)
        library = Path(found.origin).with_name("libtpu.so")
        version = importlib.metadata.version("libtpu")
        # One deadline for everything: the search for a batch size runs the script several times.
        end = time.monotonic() + timeout_s
        # Read before the script runs: what is damaged must not cost the minutes of a compilation.
        before = Golden.read(golden) if golden else None
        return cls(framework, target, library, version, steps, end, environ, status, golden, before)

    def check(self, command: Sequence[str], *, stops_when_too_large: bool = False) -> CheckedScript:
        """Run the script, compile its programs, and return what libtpu made of them."""
        from polyxla_tools.fits.compiling import CompileProcess, memory_peaks
        from polyxla_tools.fits.emulated_run import EmulatedRun
        from polyxla_tools.fits.golden import canonical
        from polyxla_tools.fits.report import CheckedProgram, CheckedScript

        checked: list[CheckedProgram] = []
        with tempfile.TemporaryDirectory(prefix="polyxla-fits-") as directory:
            run = EmulatedRun(command, self.target, self.framework, self.steps, self._left())
            self.status.phase(f"running {' '.join(command)} on an emulated {self.target.name}")
            programs = run.collect(Path(directory), self.environ, self.status.detail)
            self.status.phase(f"compiling {len(programs)} programs for it with libtpu {self.version}")
            with CompileProcess(self.library, self.target, self.environ) as compiler:
                for number, program in enumerate(programs, 1):
                    self.status.detail(f"{number} of {len(programs)}, {program.line or program.name}")
                    text = canonical(program.hlo.read_bytes()) if self.golden else ""
                    result = compiler.compile(program, self._left())
                    checked.append(CheckedProgram.of(program, result, text))
                    # The search needs no more than that: compiling the other programs takes minutes.
                    if stops_when_too_large and checked[-1].result.is_too_large:
                        return CheckedScript(checked)
                self.status.detail("the arrays that are in use")
                costs = [(found.program, found.result.cost) for found in checked if found.result.cost]

                def size_of(type_: ArrayType) -> int:
                    return compiler.size_of(type_, programs[0].options, self._left())

                return CheckedScript(checked, memory_peaks(costs, size_of))

    def find_batch(self, command: Sequence[str], first: int) -> tuple[CheckedScript, int]:
        """Return the largest batch size that fits, 0 if none does, and what libtpu made of its programs.

        Raises:
            UsageError: the command has no place for the batch size.
            ScriptFailedError: the script failed with a batch size; the largest that fitted before is named.
            CannotCompileError: a program does not compile, for another reason than its size.
            TimeLimitError: the time is over; the largest batch size that fitted before is named.
        """
        from polyxla_tools.fits.emulated_run import ScriptFailedError

        if not any(PLACE in argument for argument in command):
            raise UsageError(
                f"the script's arguments do not contain {PLACE}, which stands for the batch size",
                where=f"--find-batch {first}",
                fix=f"Write it where the script takes the batch size, such as --batch-size {PLACE}.",
            )
        tried: dict[int, CheckedScript] = {}

        def is_fitting(size: int) -> bool:
            try:
                tried[size] = self.check(with_batch_size(command, size), stops_when_too_large=True)
            except (ScriptFailedError, TimeLimitError) as error:
                fitted = max((size for size, script in tried.items() if script.fits(self.target)), default=0)
                # The search may have taken an hour: its best result so far must not be lost.
                known = f"batch size {fitted} fits; " if fitted else ""
                raise type(error)(f"{known}batch size {size}: {error}") from error
            is_too_large = tried[size].is_too_large(self.target)
            problems = [program for program in tried[size].programs if not program.result.fits]
            if problems and not is_too_large:
                raise CannotCompileError(f"batch size {size}: {problems[0].problem(self.target)}")
            self.status.phase(f"batch size {size}: {'too large' if is_too_large else 'fits'}")
            return not is_too_large

        largest = largest_fitting(is_fitting, first)
        # If none fits, the smallest size shows best what is in the way.
        return tried[largest or min(tried)], largest

    def compare(self, script: CheckedScript, *, update: bool) -> list[str] | None:
        """Return what has changed in the programs that are kept; None if none are to be kept.

        Args:
            script: what was checked. It is kept if nothing is yet.
            update: whether it is kept in place of the earlier one.

        Raises:
            UsageError: it cannot be written.
        """
        if self.golden is None:
            return None
        from polyxla_tools.fits.golden import Golden

        now = Golden.of(script, self.target, self.version)
        if self.before is None or update:
            try:
                now.write(self.golden)
            except OSError as error:
                fix = "Name a directory that you may write to."
                raise UsageError(str(error), where=f"--golden {self.golden}", fix=fix) from error
            say(f"{len(now.programs)} programs are kept in {self.golden}")
        return list(self.before.changes(now)) if self.before else []

    def _left(self) -> float:
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeLimitError("the time is over; give more with --timeout SECONDS")
        return left


def with_batch_size(command: Sequence[str], size: int) -> list[str]:
    """Return the script's arguments for a batch size."""
    return [argument.replace(PLACE, str(size)) for argument in command]


def largest_fitting(fits: Callable[[int], bool], first: int) -> int:
    """Return the largest batch size that fits; 0 if not even 1 does.

    Doubles the size until it does not fit, then halves the interval.

    Args:
        fits: tries a batch size. If one fits, so must all smaller ones.
        first: the first size to try.
    """
    fitting, too_large = 0, 0
    # The search counts in these numbers, so that it tries no size that a tile would round up anyway.
    number = _number(max(first, 1))
    while not too_large or too_large - fitting > 1:
        if fits(_size(number)):
            fitting = number
        else:
            too_large = number
        number = (fitting + too_large) // 2 if too_large else _number(2 * _size(fitting))
    return _size(fitting)


def _size(number: int) -> int:
    """Return the batch size of this number: 1 to 8, then 16, 24 and so on."""
    return number if number <= TILE else TILE * (number - TILE + 1)


def _number(size: int) -> int:
    return size if size <= TILE else size // TILE + TILE - 1


class StatusLine:
    """Shows phases on standard error; on a terminal, in one line that changes, with their details.

    Args:
        status: Rich's, on a terminal; None elsewhere.
    """

    def __init__(self, status: Any = None) -> None:
        self._status = status
        self._phase = ""

    def phase(self, text: str) -> None:
        """Begin a phase."""
        self._phase = text
        if self._status is None:
            say(text)
        else:
            self._update(text)

    def detail(self, text: str) -> None:
        """Show how far the phase is; on a terminal only."""
        if self._status is not None:
            self._update(f"{self._phase}: {text}")

    def _update(self, text: str) -> None:
        from rich.text import Text

        # A status reads a str as markup, whatever its console does, and fails at [/tmp] in an argument.
        self._status.update(Text(text))


@contextmanager
def status_line() -> Iterator[StatusLine]:
    """Show phases until the end of the block."""
    # Imported here, because every command of polyxla loads this module.
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield StatusLine()
        return
    with console.status("") as status:
        yield StatusLine(status)
