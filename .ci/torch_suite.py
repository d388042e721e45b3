"""Runs files of PyTorch's distributed tests in replicas that stay from one test to the next.

Usage: python .ci/torch_suite.py [--gloo] FILE ... --junitxml=REPORT [OPTION OF PYTEST ...]

The tests run one after the other in the replicas of ``polyxla run --each``, on an emulated TPU with as many
chips as they ask for. After one that fails in some of them only, or does not end, new replicas go on with
those that are left. A test passed if all its replicas say so. What has run is kept beside the report: a run
that is ended goes on where it stopped. With --gloo, the tests run in torchrun's processes on the CPU.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from polyxla.plugin import POLYXLA_EMULATE, snapshot
from polyxla_tools.fits.emulated_run import end_group, ending_with_this_process

LIMIT_S, START_LIMIT_S = 120.0, 400.0
"""For a test or a subtest of it, and for the start of the replicas, which import all files."""
PYTEST = (
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "torch_replicas",
    "--noconftest",
    "--tb=short",
    # A test is named after its path in the working directory.
    "--rootdir=.",
    "--continue-on-collection-errors",
)
TPUS = (1, 4, 8)


class Tests:
    """The tests of some files.

    Attributes:
        files: the files; a test is named as pytest does.
        gloo: whether they run on the CPU.
        sizes: in how many replicas each is to run, once some replicas have said so.
        outcomes: how those ended that have run.
        errors: the first error of those that failed.
        kept: the file that keeps these.
        options: of pytest.
    """

    def __init__(self, files: Sequence[str], gloo: bool, kept: Path, options: Sequence[str] = ()) -> None:
        self.files, self.gloo, self.kept, self.options = files, gloo, kept, options
        self.sizes: dict[str, int] = {}
        self.outcomes: dict[str, str] = {}
        self.errors: dict[str, str] = {}

    def run(self) -> None:
        """Run all of them; give up when replicas start without running one."""
        if self.kept.exists():
            self.sizes, self.outcomes, self.errors = json.loads(self.kept.read_text())
        while True:
            left = [test for test in self.sizes if test not in self.outcomes]
            if self.sizes and not left:
                break
            # The first replicas look at all files.
            size = self.sizes[left[0]] if left else 4
            mine = [test for test in left if self.sizes[test] == size]
            before = len(self.outcomes), len(self.sizes)
            with tempfile.TemporaryDirectory() as directory:
                journal = Path(directory)
                why = self._attempt(size, mine or self.files, journal)
                self._read(size, journal, why)
            self.kept.write_text(json.dumps([self.sizes, self.outcomes, self.errors]))
            if before == (len(self.outcomes), len(self.sizes)):
                self.outcomes |= dict.fromkeys(left or self.files, "did not start")
                break
        self.kept.unlink(missing_ok=True)

    def _attempt(self, size: int, tests: Sequence[str], journal: Path) -> str:
        """Run what is left in some replicas, until one of them ends; return why they did not go on."""
        run: tuple[str, ...] = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(size))
        environ = {**snapshot(), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        if not self.gloo:
            tpu = next(chips for chips in TPUS if chips >= size)
            run = ("polyxla", "run", "--each", "--devices", str(size))
            environ = {**snapshot(), POLYXLA_EMULATE: f"v5e-{tpu}"}
        command = (
            *ending_with_this_process(),
            sys.executable,
            "-m",
            *run,
            *PYTEST,
            f"--journal={journal}",
            *self.options,
            *tests,
        )
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            return _wait(process, journal)
        finally:
            end_group(process)

    def _read(self, size: int, journal: Path, why: str) -> None:
        """Read what the replicas have written."""
        # By test, what each replica says.
        ended: dict[str, dict[str, str]] = {}
        for path in sorted(journal.glob("*.jsonl")):
            for line in map(json.loads, path.read_text().splitlines()):
                self.sizes |= line.get("sizes", {})
                if test := line.get("test"):
                    outcomes = ended.setdefault(test, {})
                    if "outcome" in line:
                        outcomes[path.stem] = line["outcome"]
                    if line.get("error"):
                        self.errors.setdefault(test, line["error"])
        found = {
            test: next((kind for kind in ("failed", "skipped") if kind in outcomes.values()), "passed")
            for test, outcomes in ended.items()
            if "failed" in outcomes.values() or len(outcomes) == size
        }
        # A test that fails in some replicas ends all. Without one, the first that has not ended ended them.
        if all(
            how != "failed" or [*ended[test].values()] == ["failed"] * size for test, how in found.items()
        ):
            found |= dict.fromkeys([test for test in ended if test not in found][:1], why)
        self.outcomes |= found

    def write(self, report: Path) -> None:
        """Write a report, with the outcome in words where the replicas were lost."""
        suite = ET.Element("testsuite")
        for test, outcome in self.outcomes.items():
            ET.SubElement(suite, "testcase", name=test, outcome=outcome)
        ET.ElementTree(suite).write(report)


def _wait(process: subprocess.Popen[bytes], journal: Path) -> str:
    """Wait until the replicas end, or write nothing for too long."""
    size, since = -1, time.monotonic()
    while time.monotonic() - since < (LIMIT_S if size > 0 else START_LIMIT_S):
        try:
            # `polyxla run` ends so, too, where replicas wait for each other too long.
            return "failed" if process.wait(1) else "ended its replicas"
        except subprocess.TimeoutExpired:
            now = sum(path.stat().st_size for path in journal.glob("*.jsonl"))
            if now != size:
                size, since = now, time.monotonic()
    return f"not over after {LIMIT_S:.0f} s"


def main() -> int:
    """Run the files; return the exit code, which is 1 only if there is no test."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--gloo", action="store_true")
    parser.add_argument("--junitxml", type=Path, required=True)
    args, options = parser.parse_known_args()
    # The replicas are a group of their own, and are to end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    tests = Tests(args.files, args.gloo, args.junitxml.with_suffix(".json"), options)
    tests.run()
    tests.write(args.junitxml)
    for test, outcome in tests.outcomes.items():
        print(f"{outcome:8} {test} {tests.errors.get(test, '')[:200]}")
    return not tests.outcomes


if __name__ == "__main__":
    sys.exit(main())
