"""Runs a suite of tests that others wrote, on emulated TPUs, and keeps its scorecard.

Usage: python .ci/scorecard.py SUITE PATH [NAME ...] [--shard K/N] [--again]

PATH is a checkout of the suite's sources, or a directory for its files if it comes as a package. NAMEs choose
the programs whose name contains one, and --shard every N-th. What has run before with the same versions does
not run again, unless --again is given. scorecards/SUITE.toml names the tests that fail, by the owner of the
fault, and those that are not run, each with the reason. The exit code is 1 if another test fails, if one of
them passes, or if a process aborts. After a run of the whole suite, docs/scorecards.md has the new counts.
"""

from __future__ import annotations

import argparse
import datetime as dt
import fnmatch
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from suites import SUITES, Program, Suite

from polyxla.plugin import snapshot
from polyxla_tools.fits.emulated_run import end_group, ending_with_this_process

ROOT = Path(__file__).parent.parent
SCORECARDS = Path(__file__).with_name("scorecards")
PAGE = ROOT / "docs" / "scorecards.md"
CACHE = ROOT / ".cache" / "scorecards"
OURS = "ours"
PASSED, FAILED, SKIPPED, NOT_RUN = "passed", "failed", "skipped", "not run"
INTRODUCTION = """\
What others wrote to test TPUs and devices of PyTorch, run on emulated TPUs. A test that fails has an owner:
the project whose code is at fault, or *chips* where only a chip can do what it asks for. Each of these tests
is listed below with the reason."""


@dataclass(frozen=True)
class Expected:
    """What scorecards/SUITE.toml says.

    Attributes:
        owners: for each owner of faults, and for "not run": the patterns of tests, and the reasons.
    """

    owners: dict[str, dict[str, str]]

    @classmethod
    def of(cls, suite: str) -> Expected:
        """Read a suite's file: of each owner, a pattern and its reason, or a reason and its patterns."""
        read = tomllib.loads((SCORECARDS / f"{suite}.toml").read_text())
        owners: dict[str, dict[str, str]] = {owner: {} for owner in read}
        for owner, entries in read.items():
            for key, value in entries.items():
                owners[owner] |= {key: value} if isinstance(value, str) else dict.fromkeys(value, key)
        return cls(owners)

    def find(self, name: str) -> tuple[str, str]:
        """Return the owner of a test's failure, and the reason; empty if it should pass."""
        for owner, patterns in self.owners.items():
            for pattern, reason in patterns.items():
                if name == pattern or fnmatch.fnmatchcase(name, pattern):
                    return owner, reason
        return "", ""


@dataclass
class Result:
    """How one program ended.

    Attributes:
        program: its name.
        versions: of what it ran with.
        seconds: that it took.
        cases: how each of its tests ended, by name.
    """

    program: str
    versions: str
    seconds: float
    cases: dict[str, str] = field(default_factory=dict)


def run(suite: Suite, program: Program, root: Path, logs: Path) -> dict[str, str]:
    """Run a program and return how each of its tests ended. Its output goes to a file of `logs`."""
    stem = re.sub(r"\W+", "-", program.name)
    report = logs / f"{stem}.xml"
    report.unlink(missing_ok=True)
    options = [f"--junitxml={report}"] if program.is_pytest else []
    own = {name: value.replace("LOGS", str(logs)) for name, value in program.variables.items()}
    arguments = [argument.replace("LOGS", str(logs)) for argument in program.arguments]
    environ = {**snapshot(), **suite.variables, **own}
    with (logs / f"{stem}.log").open("w") as log:
        ended = _end(
            subprocess.Popen(
                [*ending_with_this_process(), sys.executable, *arguments, *options],
                env=environ | {"PYTHONPATH": os.pathsep.join(map(str, suite.paths(root)))},
                cwd=suite.paths(root)[0],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Its replicas end with it.
                start_new_session=True,
            ),
            program.timeout_s,
        )
    if ended == PASSED and program.gives_up and program.gives_up in (logs / f"{stem}.log").read_text():
        ended = FAILED
    cases = _cases(report, program.name) if report.exists() else {}
    # A report lacks a test that ended its process, or that failed in another replica.
    if not cases or ended not in (PASSED, FAILED) or (ended == FAILED and FAILED not in cases.values()):
        cases[program.name] = ended
    return cases


def _end(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        end_group(process)
        return f"not over after {timeout_s:.0f} s"
    return {0: PASSED}.get(code, FAILED if code > 0 else f"ended by signal {-code}")


def _cases(report: Path, program: str) -> dict[str, str]:
    """Read a report of pytest, or of `torch_suite.py`."""
    cases = {}
    # pytest wrote it here.
    for case in ET.parse(report).iter("testcase"):  # noqa: S314
        if how := case.get("outcome"):
            # `torch_suite.py` runs several files, and says in words how a test ended its processes.
            cases[str(case.get("name"))] = how
            continue
        kinds = {child.tag for child in case}
        outcome = FAILED if kinds & {"failure", "error"} else SKIPPED if "skipped" in kinds else PASSED
        # A class of tests is the last part of what pytest calls the class.
        group = case.get("classname", "").rpartition(".")[2]
        name = f"{group}::{case.get('name')}" if group[:1].isupper() else str(case.get("name"))
        cases[f"{program}::{name}"] = outcome
    return cases


def versions(suite: Suite) -> str:
    """Return the versions of what a suite runs with."""
    return ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", *suite.packages))


def judge(result: Result, expected: Expected) -> tuple[Counter[str], list[str]]:
    """Count a program's tests by how they ended, failures by owner, and name those that nobody expects."""
    counts: Counter[str] = Counter()
    surprises = []
    for name, outcome in result.cases.items():
        owner, _ = expected.find(name)
        if outcome in (PASSED, SKIPPED):
            counts[outcome] += 1
            if owner and outcome == PASSED:
                surprises.append(f"{name} passed")
        else:
            counts[owner or OURS] += 1
            # A process that aborts is a fault, whoever is its owner.
            if not owner or outcome != FAILED:
                surprises.append(f"{name} {outcome}")
    return counts, surprises


def chosen(programs: Sequence[Program], names: Sequence[str], shard: str) -> list[Program]:
    """Return the programs that are asked for."""
    first, count = map(int, shard.split("/"))
    if not 1 <= first <= count:
        raise SystemExit(f"--shard {shard}: write K/N, where K is 1 to N")
    found = [program for program in programs if not names or any(name in program.name for name in names)]
    return found[first - 1 :: count]


def earlier(suite: str, versions: str) -> Iterator[Result]:
    """Yield the results of earlier runs with the same versions."""
    path = CACHE / f"{suite}.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        result = Result(**json.loads(line))
        if result.versions == versions:
            yield result


def main() -> int:
    """Run a suite; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("path", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--shard", default="1/1")
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    suite, expected = SUITES[args.suite], Expected.of(args.suite)
    root = args.path.resolve()
    logs = CACHE / args.suite
    logs.mkdir(parents=True, exist_ok=True)
    found, programs = versions(suite), list(suite.programs(root))
    runnable = [program for program in programs if expected.find(program.name)[0] != NOT_RUN]
    asked = chosen(runnable, args.names, args.shard)
    done = {result.program: result for result in earlier(args.suite, found)}
    for program in asked if args.again else ():
        done.pop(program.name, None)
    print(f"{args.suite}: {len(programs)} programs, with {found}; their output is in {logs}", flush=True)
    surprises: list[str] = []
    for program in asked:
        if program.name not in done:
            began = time.monotonic()
            cases = run(suite, program, root, logs)
            done[program.name] = Result(program.name, found, round(time.monotonic() - began, 1), cases)
            with (CACHE / f"{args.suite}.jsonl").open("a") as file:
                file.write(json.dumps(asdict(done[program.name])) + "\n")
        counts, unexpected = judge(done[program.name], expected)
        surprises += unexpected
        text = ", ".join(f"{count} {name}" for name, count in counts.items())
        print(f"{done[program.name].seconds:6.0f} s  {program.name}: {text}", flush=True)
    print(*(f"not as expected: {surprise}" for surprise in surprises), sep="\n")
    if all(program.name in done for program in runnable):
        keep(args.suite, [done[program.name] for program in runnable], expected)
    return bool(surprises)


def keep(name: str, results: Sequence[Result], expected: Expected) -> None:
    """Write the counts of a whole run, and the page."""
    total: Counter[str] = Counter()
    for result in results:
        total += judge(result, expected)[0]
    card = {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "versions": results[0].versions,
        "cores": os.cpu_count(),
        "minutes": round(sum(result.seconds for result in results) / 60, 1),
        "counts": dict(sorted(total.items())),
    }
    (SCORECARDS / f"{name}.json").write_text(json.dumps(card, indent=2) + "\n")
    PAGE.write_text(page())
    print(f"{name}: {card['counts']}; written to {PAGE}")


def page() -> str:
    """Return docs/scorecards.md."""
    cards = {name: json.loads(path.read_text()) for name in SUITES if (path := _card(name)).exists()}
    others = sorted({owner for card in cards.values() for owner in card["counts"]} - {PASSED, SKIPPED, OURS})
    lines = [
        "# Scorecards",
        "",
        INTRODUCTION,
        "",
        "<!-- Written by .ci/scorecard.py from .ci/scorecards; do not edit. -->",
        "",
        _row(
            "suite",
            "passed",
            f"failed: {OURS}",
            *(f"failed: {owner}" for owner in others),
            "skipped",
            "not run",
        ),
        _row("---", *["---:"] * (4 + len(others))),
    ]
    for name, card in cards.items():
        counts, left = card["counts"], Expected.of(name).owners.get(NOT_RUN, {})
        kinds = (PASSED, OURS, *others, SKIPPED)
        lines.append(_row(f"[{name}](#{name})", *(counts.get(kind, 0) for kind in kinds), len(left)))
    for name, card in cards.items():
        lines += ["", *_section(name, card)]
    return "\n".join(lines) + "\n"


def _section(name: str, card: dict[str, Any]) -> Iterator[str]:
    suite = SUITES[name]
    yield f"## {name}"
    yield ""
    yield f"{suite.what} Source: {suite.source}."
    yield ""
    command = f"nox -s \"scorecard(suite='{name}')\" -- {suite.path}"
    yield f"`{command}`, {card['date']}: {card['minutes']} minutes on {card['cores']} cores, with"
    yield f"{card['versions']}."
    rows: dict[tuple[str, str], list[str]] = {}
    for owner, reasons in Expected.of(name).owners.items():
        for pattern, reason in reasons.items():
            rows.setdefault((owner, reason), []).append(pattern)
    if rows:
        yield ""
        yield _row("test", "owner", "reason")
        yield _row("---", "---", "---")
        for (owner, reason), patterns in rows.items():
            # Of a long list one is enough to try.
            shown = patterns if len(patterns) < 4 else patterns[:1]
            others = "" if shown == patterns else f" and {len(patterns) - 1} others"
            yield _row(", ".join(f"`{pattern}`" for pattern in shown) + others, owner, reason)


def _card(name: str) -> Path:
    return SCORECARDS / f"{name}.json"


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    sys.exit(main())
