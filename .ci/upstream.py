"""Runs torch_xla's own list of TPU tests on an emulated v4-8, each file in a process of its own.

Usage: python .ci/upstream.py CHECKOUT [NAME ...]

CHECKOUT is a working copy of https://github.com/pytorch/xla at the tag of the installed torch_xla. The list
is its test/tpu/run_tests.sh; NAMEs choose the files whose path contains one. upstream.toml names those that
fail or are not run, and why. Fails if another file fails, if one of them passes, or if a process aborts.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

from polyxla.plugin import snapshot

TIMEOUT_S = 900
WRAPPERS = {
    "run_save_tensor_hlo": {"XLA_SAVE_TENSORS_FMT": "hlo"},
    "run_xla_hlo_debug": {"XLA_HLO_DEBUG": "1"},
    "run_xla_ir_hlo_debug": {"XLA_IR_DEBUG": "1", "XLA_HLO_DEBUG": "1"},
}
"""Variables that the list's shell functions set. Source: test/utils/run_tests_utils.sh of torch_xla 2.9.0."""


class Test(NamedTuple):
    """One line of the list."""

    path: str
    options: tuple[str, ...]
    variables: dict[str, str]

    def __str__(self) -> str:
        return " ".join((self.path, *(option for option in self.options if option != "-v")))


def read_list(text: str) -> list[Test]:
    """Read the lines of the shell script that run a test."""
    tests = []
    for line in text.splitlines():
        match = re.fullmatch(r'((?:\w+=\S+ |run_\w+ )*)run_test "\$_TEST_DIR/(\S+)"(.*)', line)
        if match is None:
            continue
        words = match[1].split()
        variables = dict(word.split("=", 1) for word in words if "=" in word)
        for word in words:
            variables |= WRAPPERS.get(word, {})
        options = tuple(option for option in shlex.split(match[3]) if option != "$@")
        tests.append(Test(match[2], options, variables))
    return tests


def run(test: Test, root: Path, logs: Path) -> tuple[str, float]:
    """Run a file; return how it ended, and after how many seconds. Its output goes to a file of `logs`."""
    environ = {**snapshot(), **test.variables, "PYTHONPATH": str(root), "POLYXLA_EMULATE": "v4-8"}
    if "XLA_SAVE_TENSORS_FMT" in test.variables:
        environ["XLA_SAVE_TENSORS_FILE"] = str(logs / "saved_tensors.txt")
    command = [sys.executable, str(root / test.path), *test.options]
    began = time.monotonic()
    with (logs / (re.sub(r"\W+", "-", str(test)) + ".log")).open("w") as log:
        try:
            code = subprocess.run(
                command,
                env=environ,
                cwd=root,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"not over after {TIMEOUT_S} s", time.monotonic() - began
    ended = {0: "passed"}.get(code, "failed" if code > 0 else f"aborted by signal {-code}")
    return ended, time.monotonic() - began


def main(checkout: str, *names: str) -> int:
    """Run the list and print a table; return the exit code."""
    root = Path(checkout, "test").resolve()
    known = tomllib.loads(Path(__file__).with_name("upstream.toml").read_text())
    logs = Path(tempfile.mkdtemp(prefix="polyxla-upstream-"))
    tests = read_list((root / "tpu" / "run_tests.sh").read_text())
    chosen = [test for test in tests if not names or any(name in str(test) for name in names)]
    problems, passed = [], 0
    print(f"{len(chosen)} of {len(tests)} files; their output is in {logs}", flush=True)
    for test in chosen:
        if reason := known["not run"].get(str(test)):
            print(f"{'not run':24}    -    {test}  {reason}", flush=True)
            continue
        ended, seconds = run(test, root, logs)
        reason = known["failing"].get(str(test), "")
        passed += ended == "passed"
        print(f"{ended:24} {seconds:5.0f} s  {test}  {reason}", flush=True)
        if (ended == "passed") == bool(reason) or ended not in ("passed", "failed"):
            problems.append(str(test))
    print(
        f"{passed} of {len(chosen)} passed"
        + (f"; not as expected: {', '.join(problems)}" if problems else "")
    )
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
