"""The scorecards of suites that others wrote: .ci/scorecard.py, and the page that it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from polyxla_testing.processes import wait_for_end_of

ROOT = Path(__file__).parents[1]
TESTS = """
import os, pytest
def test_passes(): open("ran", "a").write("x")
def test_fails(): assert os.environ["GIVEN"] == "other"
def test_has_no_owner(): assert False
@pytest.mark.skip
def test_is_skipped(): pass
"""
WAITS = """
import subprocess, sys
sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", sleep])
open("child", "w").write(str(child.pid))
child.wait()
"""


@pytest.fixture
def scorecard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with a suite of three programs and with its files in a directory of the test."""
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    import scorecard as module
    import suites

    programs = [
        suites.Program("test_some.py", (*suites.PYTEST, "test_some.py"), {"GIVEN": "one"}, is_pytest=True),
        suites.Program("aborts.py", ("aborts.py",)),
        suites.Program("waits.py", ("waits.py",), timeout_s=3),
        suites.Program("left_out.py", ("left_out.py",)),
    ]
    suite = suites.Suite("Theirs.", "a test", "PATH", (), lambda _: iter(programs), {})
    monkeypatch.setattr(module, "SUITES", {"theirs": suite})
    monkeypatch.setattr(module, "SCORECARDS", tmp_path)
    monkeypatch.setattr(module, "PAGE", tmp_path / "scorecards.md")
    monkeypatch.setattr(module, "CACHE", tmp_path / "cache")
    (tmp_path / "theirs").mkdir()
    for name, text in {
        "test_some.py": TESTS,
        "aborts.py": "import os; os.abort()",
        "waits.py": WAITS,
        "../theirs.toml": EXPECTED,
    }.items():
        (tmp_path / "theirs" / name).write_text(text)
    return module


EXPECTED = """
[peer]
"test_some.py::test_f*" = "the peer's defect"
"waits.py" = "waits for ever"

["not run"]
"left_out.py" = "takes a day"
"""


def run(module: Any, monkeypatch: pytest.MonkeyPatch, path: Path, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["scorecard.py", "theirs", str(path), *options])
    code: int = module.main()
    return code


def test_each_test_has_an_outcome_and_each_failure_an_owner(
    scorecard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(scorecard, monkeypatch, tmp_path / "theirs") == 1
    said = capsys.readouterr().out
    surprises = [line for line in said.splitlines() if line.startswith("not as expected: ")]
    assert surprises == [
        "not as expected: test_some.py::test_has_no_owner failed",
        "not as expected: aborts.py ended by signal 6",
        # A program that does not end is a surprise even where it is known to fail.
        "not as expected: waits.py not over after 3 s",
    ]
    card = json.loads((tmp_path / "theirs.json").read_text())
    assert card["counts"] == {"ours": 2, "passed": 1, "peer": 2, "skipped": 1}
    assert "| [theirs](#theirs) | 1 | 2 | 2 | 1 | 1 |" in scorecard.PAGE.read_text()
    assert "| `test_some.py::test_f*` | peer | the peer's defect |" in scorecard.PAGE.read_text()


def test_the_processes_of_a_program_that_takes_too_long_end(
    scorecard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(scorecard, monkeypatch, tmp_path / "theirs", "waits")
    wait_for_end_of([int((tmp_path / "theirs" / "child").read_text())])


def test_a_run_goes_on_where_it_stopped(
    scorecard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    for options in (["some"], [], ["some", "--again"]):
        run(scorecard, monkeypatch, theirs, *options)
    assert (theirs / "ran").read_text() == "xx"
    with pytest.raises(SystemExit, match="--shard 3/2: write K/N"):
        run(scorecard, monkeypatch, theirs, "--shard", "3/2")


def test_a_failure_that_is_known_and_passes_is_reported(
    scorecard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs.toml").write_text(EXPECTED.replace("test_f*", "test_passes"))
    assert run(scorecard, monkeypatch, tmp_path / "theirs", "some") == 1
    assert "not as expected: test_some.py::test_passes passed" in capsys.readouterr().out


def test_several_tests_can_have_one_reason(
    scorecard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = [f"test_some.py::test_{end}" for end in ("fails", "has_no_owner", "is_nowhere", "is_no_test")]
    (tmp_path / "theirs.toml").write_text(f'[peer]\n"the same defect" = {tests}\n')
    assert run(scorecard, monkeypatch, tmp_path / "theirs", "some") == 0
    assert "2 peer" in capsys.readouterr().out
    (tmp_path / "theirs.json").write_text(
        json.dumps(dict.fromkeys(("date", "versions", "cores", "minutes"), "") | {"counts": {}})
    )
    assert f"| `{tests[0]}` and 3 others | peer | the same defect |" in scorecard.page()


def test_the_page_has_the_counts_of_the_last_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    import scorecard as module

    assert (ROOT / "docs" / "scorecards.md").read_text() == module.page()


def test_replicas_that_a_test_ends_are_replaced_for_those_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    import scorecard as module
    from torch_suite import Tests

    # What each of two replicas writes before it ends, in each of four attempts.
    sizes = {"sizes": dict.fromkeys(["Some::passes", "Some::fails", "Some::hangs", "Some::skips"], 2)}
    sizes["sizes"] |= {"Other::passes": 1}
    attempts: list[list[list[tuple[str, str]]]] = [
        [[], [], [], []],
        [
            [("Some::passes", "passed"), ("Some::fails", "passed"), ("Some::hangs", "")],
            [("Some::passes", "passed"), ("Some::fails", "failed")],
        ],
        [[("Some::hangs", ""), ("Some::skips", "skipped")], [("Some::hangs", "")]],
        [[("Some::skips", "skipped")], [("Some::skips", "skipped")]],
        [[("Other::passes", "passed")]],
    ]
    asked = []

    def attempt(_: Tests, size: int, journal: Path) -> str:
        asked.append((size, len(json.loads((journal / "done.json").read_text()))))
        for rank, ended in enumerate(attempts[len(asked) - 1]):
            lines: list[Any] = [sizes]
            for test, outcome in ended:
                lines += [{"test": test}, *([{"test": test, "outcome": outcome}] if outcome else [])]
            (journal / f"{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return "not over after 120 s"

    monkeypatch.setattr(Tests, "_attempt", attempt)
    tests = Tests("some.py", gloo=False)
    tests.run()
    assert asked == [(4, 0), (2, 0), (2, 2), (2, 3), (1, 4)]
    tests.write(str(tmp_path / "report.xml"))
    assert module._cases(tmp_path / "report.xml", "some.py") == {
        "some.py::Some::passes": "passed",
        "some.py::Some::fails": "failed",
        "some.py::Some::hangs": "not over after 120 s",
        "some.py::Some::skips": "skipped",
        "some.py::Other::passes": "passed",
    }
