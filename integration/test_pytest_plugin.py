"""pytest on replicas: a user's tests, run as the user does."""

from __future__ import annotations

import json
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


def run_python(runtime: RuntimeUnderTest, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={**os.environ, **runtime.environ},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("option", "measure"),
    [
        pytest.param("-q", ["coverage", "run", "--source=.", "-m"], marks=pytest.mark.long, id="coverage"),
        pytest.param("-n2", [], marks=pytest.mark.long, id="xdist"),
    ],
)
def test_a_test_has_the_outcome_of_its_replicas(
    runtime: RuntimeUnderTest, tmp_path: Path, option: str, measure: list[str]
) -> None:
    (tmp_path / "test_mine.py").write_text((PROGRAMS / "tests_on_replicas.py").read_text())
    # Options that a project may set, and that a replica's pytest must ignore.
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npolyxla_runtime = {runtime.name}\naddopts = -rA --color=yes --color=no {option}\n"
        "  --strict-markers --strict-config\nconsole_output_style = count\njunit_family = xunit2\n"
        "log_cli = true\n"
    )
    done = run_python(runtime, tmp_path, *measure, "pytest")
    outcomes = re.findall(r"^(PASSED|FAILED|ERROR|XFAIL) \S+::test_(\w+)", done.stdout, re.MULTILINE)
    found = {outcome: [name for result, name in outcomes if result == outcome] for outcome, _ in outcomes}
    assert {outcome: sorted(names) for outcome, names in found.items()} == {
        "PASSED": [
            *("passes_as_a_method", "passes_with_a_url", "passes_with_a_warning"),
            "passes_with_its_fixtures",
        ],
        "FAILED": [
            *("fails_as_a_method", "fails_because_one_dies", "fails_by_its_mark", "fails_on_both"),
            *("fails_on_one", "fails_on_one"),
        ],
        "XFAIL": ["xfails"],
        "ERROR": ["errs_without_the_mark"],
    }, done.stdout
    assert re.search(r"^SKIPPED \[1\] \S+: not on 2$", done.stdout, re.MULTILINE)
    assert re.search(
        r"^replicas 0, 1: (AssertionError: )?assert \[1, 2\] == \[1, 3\]$", done.stdout, re.MULTILINE
    )
    assert done.stdout.count("\nreplica 1: AssertionError: not here\n") == 2, done.stdout
    assert re.search(r"Captured stdout of replica 1 call -+\ntwo words of 1\n", done.stdout)
    assert re.search(r"^ReplicaLostError: .*replica 1.* exited with code 3", done.stdout, re.MULTILINE)
    assert "Mark it with @pytest.mark.replicas(2), which runs it on two." in done.stdout
    assert "\nreplica 0: assert 0 == 1\n" in done.stdout
    assert "the mark has an argument too many (from @pytest.mark.replicas(2, count=2)). Write " in done.stdout
    assert done.stdout.count("FutureWarning: be careful\n") == 1, "of both replicas, in the summary"
    assert "DeprecationWarning" not in done.stdout, "torch_xla's own calls"
    if measure:
        assert covered(runtime, tmp_path) >= lines_with(tmp_path, "passes_with_its_fixtures", "be careful")


def covered(runtime: RuntimeUnderTest, folder: Path) -> set[str]:
    """Return the lines of the tests that ran, by coverage's file in the folder."""
    done = run_python(runtime, folder, "coverage", "json", "-o", "-", "-q")
    (file,) = json.loads(done.stdout)["files"].values()
    text = (folder / "test_mine.py").read_text().splitlines()
    return {text[number - 1].strip() for number in file["executed_lines"]}


def lines_with(folder: Path, *words: str) -> set[str]:
    text = (folder / "test_mine.py").read_text().splitlines()
    return {line.strip() for line in text if any(word in line for word in words)}


@pytest.mark.slow
@pytest.mark.pjrt
def test_the_pages_examples_pass(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "test_replicas.py").write_text("\n\n".join(blocks))
    done = run_python(runtime, tmp_path, "pytest", "-rA", f"--polyxla-runtime={runtime.name}")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 4
