"""Runs tests of devices on TorchTPU's with pytest, and goes on after a test that aborts.

Usage: python .ci/torch_file.py SUITE [OPTION ...] --junitxml=REPORT

The OPTIONs are pytest's, files among them, and those of the plugin `journal.py`. Tests that
scorecards/SUITE.toml has under "not run" are left out. A test that ends its process, or that does not end,
has that as its outcome.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from scorecard import NOT_RUN, Expected

from polyxla_tools.fits.emulated_run import end_group, ending_with_this_process

LIMIT_S = 300.0
"""For a test."""
START_LIMIT_S = 1200.0
"""For the start of the process: some need minutes to find their tests."""
ENDED = "ended its process with code {}"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "journal")


def run(options: Sequence[str], journal: Path) -> dict[str, str]:
    """Run what the journal lacks of the tests, in one process after the other; return how each ended."""
    journal.touch()
    while True:
        before = journal.stat().st_size
        # C++ writes why it aborts.
        command = [
            *ending_with_this_process(),
            sys.executable,
            *PYTEST,
            "--capture=sys",
            f"--journal={journal}",
            *options,
        ]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            why = _wait(process, journal)
        finally:
            end_group(process)
        outcomes = _read(journal)
        hanging = [test for test, outcome in outcomes.items() if not outcome]
        for test in hanging:
            with journal.open("a") as file:
                file.write(json.dumps({"test": test, "outcome": why}) + "\n")
        # A process may also abort between two tests.
        if journal.stat().st_size != before and (hanging or "signal" in why):
            continue
        outcomes = _read(journal)
        # A process after one that was lost may find no test left.
        if why not in (ENDED.format(0), ENDED.format(1)) and not (outcomes and why == ENDED.format(5)):
            raise SystemExit(f"pytest {why}, and says above why; {len(outcomes)} tests were over")
        return outcomes


def _read(journal: Path) -> dict[str, str]:
    lines = map(json.loads, journal.read_text().splitlines())
    return {line["test"]: line.get("outcome", "") for line in lines}


def _wait(process: subprocess.Popen[bytes], journal: Path) -> str:
    """Wait until the process ends, or begins no other test for too long; return how a test ended it."""
    size, since, limit_s = journal.stat().st_size, time.monotonic(), START_LIMIT_S
    while time.monotonic() - since < limit_s:
        try:
            code = process.wait(1)
        except subprocess.TimeoutExpired:
            now = journal.stat().st_size
            if now != size:
                size, since, limit_s = now, time.monotonic(), LIMIT_S
        else:
            return f"ended by signal {-code}" if code < 0 else ENDED.format(code)
    return f"not over after {limit_s:.0f} s"


def write(outcomes: dict[str, str], report: str) -> None:
    """Write a report like pytest's, with each test's whole name and its outcome in words."""
    suite = ET.Element("testsuite")
    for test, outcome in outcomes.items():
        file, _, in_file = test.partition("::")
        ET.SubElement(suite, "testcase", name=f"{Path(file).name}::{in_file}", outcome=outcome)
    ET.ElementTree(suite).write(report)


def main() -> int:
    """Run the tests; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("suite")
    parser.add_argument("--junitxml", required=True)
    args, options = parser.parse_known_args()
    left_out = [f"--leave-out={pattern}" for pattern in Expected.of(args.suite).owners.get(NOT_RUN, {})]
    with tempfile.TemporaryDirectory() as directory:
        journal = Path(directory) / "journal"
        outcomes = run((*left_out, *options), journal)
        # The errors are here to be read.
        Path(args.junitxml).with_suffix(".jsonl").write_text(journal.read_text())
    write(outcomes, args.junitxml)
    return any(outcome not in ("passed", "skipped") for outcome in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
