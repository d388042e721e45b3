"""The scorecards of suites that others wrote: .ci/scorecard.py, and the page that it writes."""

from __future__ import annotations

import ast
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

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
ABORTS = """
import os, pytest
class Test:
    def test_a(self): pass
    def test_aborts(self): os.abort()
    def test_b(self): pytest.skip("not here")
    def test_c(self): assert False
    def test_y(self): pass
    def test_x(self): pass
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
    """The module, with a suite of a few programs and with its files in a directory of the test."""
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    import scorecard as module
    import suites

    programs = [
        suites.Program("test_some.py", (*suites.PYTEST, "test_some.py"), {"GIVEN": "one"}, is_pytest=True),
        suites.Program("aborts.py", ("aborts.py",)),
        suites.Program("waits.py", ("waits.py",), timeout_s=3),
        suites.Program("left_out.py", ("left_out.py",)),
        suites.Program("gives_up.py", ("gives_up.py",), gives_up="too few devices"),
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
        "gives_up.py": "print('too few devices, exiting')",
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
        "not as expected: gives_up.py failed",
    ]
    card = json.loads((tmp_path / "theirs.json").read_text())
    assert card["counts"] == {"ours": 3, "passed": 1, "peer": 2, "skipped": 1}
    assert "| [theirs](#theirs) | 1 | 3 | 2 | 1 | 1 |" in scorecard.PAGE.read_text()
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


def test_pytest_goes_on_after_a_test_that_aborts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / ".ci"))
    monkeypatch.chdir(tmp_path)
    import torch_file

    Path("test_it.py").write_text(ABORTS)
    outcomes = torch_file.run(("test_it.py", "--leave-out=*::Test::test_[xy]"), tmp_path / "journal")
    assert {test.rpartition("::")[2]: outcome for test, outcome in outcomes.items()} == {
        "test_a": "passed",
        "test_aborts": "ended by signal 6",
        "test_b": "skipped",
        "test_c": "failed",
    }
    torch_file.write(outcomes, "report.xml")
    import scorecard as module

    assert module._cases(Path("report.xml"), "test_it.py") == {
        f"test_it.py::{test.partition('::')[2]}": outcome for test, outcome in outcomes.items()
    }
    # What the journal has does not run again.
    with_slice = ("test_it.py", "--slice=2/2")
    assert set(torch_file.run(with_slice, tmp_path / "journal")) - set(outcomes) == {
        "test_it.py::Test::test_x"
    }


def test_tests_that_pytest_does_not_find_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / ".ci"))
    monkeypatch.chdir(tmp_path)
    import torch_file

    Path("conftest.py").write_text("1 / 0")
    Path("test_it.py").write_text(ABORTS)
    with pytest.raises(SystemExit, match=r"pytest ended its process with code 4, .* 0 tests were over"):
        torch_file.run(("test_it.py",), tmp_path / "journal")


def test_the_page_has_the_counts_of_the_last_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    import scorecard as module

    assert (ROOT / "docs" / "scorecards.md").read_text() == module.page()


def test_each_suite_has_a_session_and_runs_every_week(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    from suites import SUITES

    # The environment of these tests has no nox.
    assigned = {
        node.targets[0].id: node.value
        for node in ast.parse((ROOT / "noxfile.py").read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    sessions = ast.literal_eval(assigned["SCORECARDS"])
    workflow = yaml.safe_load((ROOT / ".github/workflows/scorecards.yml").read_text())
    weekly = [entry["suite"] for entry in workflow["jobs"]["scorecard"]["strategy"]["matrix"]["include"]]
    assert sorted(weekly) == sorted(sessions) == sorted(SUITES)
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert {f"scorecard-{project}" for _, project in sessions.values()} <= groups.keys()


def test_replicas_that_a_test_ends_are_replaced_for_those_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    import scorecard as module
    from torch_suite import Tests

    # What each replica writes before it ends, in each of the attempts.
    names = ("a.py::Some::passes", "a.py::Some::fails", "b.py::hangs", "b.py::fails_alike", "b.py::hangs_too")
    sizes = {"sizes": dict.fromkeys((*names, "b.py::skips"), 2) | {"b.py::is_alone": 1}}
    attempts: list[list[list[tuple[str, str]]]] = [
        [[], [], [], []],
        [
            [("a.py::Some::passes", "passed"), ("a.py::Some::fails", "passed"), ("b.py::hangs", "")],
            [("a.py::Some::passes", "passed"), ("a.py::Some::fails", "failed")],
        ],
        [[("b.py::hangs", ""), ("b.py::skips", "skipped")], [("b.py::hangs", "")]],
        # Replicas that have failed alike go on.
        [[("b.py::fails_alike", "failed"), ("b.py::hangs_too", "")]] * 2,
        [[("b.py::skips", "skipped")], [("b.py::skips", "skipped")]],
        [[("b.py::is_alone", "passed")]],
    ]
    asked = []

    def attempt(_: Tests, size: int, tests: list[str], journal: Path) -> str:
        asked.append((size, [test.rpartition("::")[2] for test in tests]))
        for rank, ended in enumerate(attempts[len(asked) - 1]):
            lines: list[Any] = [sizes]
            for test, outcome in ended:
                lines += [{"test": test}, *([{"test": test, "outcome": outcome}] if outcome else [])]
            (journal / f"{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return "not over after 120 s"

    monkeypatch.setattr(Tests, "_attempt", attempt)
    report = tmp_path / "report.xml"
    tests = Tests(["a.py", "b.py"], gloo=False, kept=report.with_suffix(".json"))
    tests.run()
    assert asked == [
        (4, ["a.py", "b.py"]),
        (2, ["passes", "fails", "hangs", "fails_alike", "hangs_too", "skips"]),
        (2, ["hangs", "fails_alike", "hangs_too", "skips"]),
        (2, ["fails_alike", "hangs_too", "skips"]),
        (2, ["skips"]),
        (1, ["is_alone"]),
    ]
    tests.write(report)
    assert module._cases(report, "theirs") == {
        "a.py::Some::passes": "passed",
        "a.py::Some::fails": "failed",
        "b.py::hangs": "not over after 120 s",
        "b.py::fails_alike": "failed",
        "b.py::hangs_too": "not over after 120 s",
        "b.py::skips": "skipped",
        "b.py::is_alone": "passed",
    }


def test_tests_go_on_where_they_were_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    from torch_suite import Tests

    def attempt(_: Tests, size: int, tests: list[str], journal: Path) -> str:
        if tests == ["a.py::two"]:
            raise KeyboardInterrupt
        lines: list[Any] = [{"sizes": {"a.py::one": 1, "a.py::two": 1}}]
        lines += [{"test": "a.py::one", "outcome": "passed"}] if size == 1 else []
        (journal / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return "failed"

    monkeypatch.setattr(Tests, "_attempt", attempt)
    for _ in range(2):
        tests = Tests(["a.py"], gloo=False, kept=tmp_path / "kept.json")
        with pytest.raises(KeyboardInterrupt):
            tests.run()
    assert tests.outcomes == {"a.py::one": "passed"}
