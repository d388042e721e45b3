"""pytest on replicas: a user's tests, run as the user does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from polyxla_testing import RuntimeUnderTest

WAIT_S = 280
PROGRAMS = Path(__file__).parent / "programs"
PAGE = Path(__file__).parent.parent / "docs" / "testing.md"


def run_pytest(runtime: RuntimeUnderTest, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text(f"[pytest]\npolyxla_runtime = {runtime.name}\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "--color=no", *options],
        cwd=folder,
        env={**os.environ, **runtime.environ},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


@pytest.mark.parametrize("options", [[], pytest.param(["-n2"], marks=pytest.mark.long, id="xdist")])
def test_a_test_has_the_outcome_of_its_replicas(
    runtime: RuntimeUnderTest, tmp_path: Path, options: list[str]
) -> None:
    (tmp_path / "test_mine.py").write_text((PROGRAMS / "tests_on_replicas.py").read_text())
    done = run_pytest(runtime, tmp_path, *options)
    outcomes = re.findall(r"^(PASSED|FAILED|ERROR|XFAIL) \S+::test_(\w+)", done.stdout, re.MULTILINE)
    found = {outcome: [name for one, name in outcomes if one == outcome] for outcome, _ in outcomes}
    assert {outcome: sorted(names) for outcome, names in found.items()} == {
        "PASSED": ["passes_with_its_fixtures"],
        "FAILED": ["fails_because_one_dies", "fails_on_both", "fails_on_one", "fails_on_one"],
        "XFAIL": ["xfails"],
        "ERROR": ["errs_without_the_mark"],
    }, done.stdout
    assert re.search(r"^SKIPPED \[1\] \S+: not on 2$", done.stdout, re.MULTILINE)
    assert "\nreplicas 0, 1: assert [1, 2] == [1, 3]\n" in done.stdout
    assert done.stdout.count("\nreplica 1: AssertionError: not here\n") == 2, done.stdout
    assert re.search(r"Captured stdout of replica 1 call -+\ntwo words of 1\n", done.stdout)
    assert re.search(r"^ReplicaLostError: .*replica 1.* exited with code 3", done.stdout, re.MULTILINE)
    assert "Mark it with @pytest.mark.replicas(2), which runs it on two." in done.stdout


@pytest.mark.pjrt
def test_the_pages_examples_pass(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "test_replicas.py").write_text("\n\n".join(blocks))
    done = run_pytest(runtime, tmp_path)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 4
