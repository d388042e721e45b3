"""A script under `polyxla run` behaves as under python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 60.0
PROGRAMS = Path(__file__).parent / "programs"
REPORT = (PROGRAMS / "main_module_report.py").read_text()


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder" / "package").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for name in (
        "look.py",
        "folder/look.py",
        "folder/__main__.py",
        "folder/package/__main__.py",
        "folder/package/look.py",
    ):
        (tmp_path / name).write_text(REPORT)
    (tmp_path / "folder" / "package" / "__init__.py").touch()
    (tmp_path / "elsewhere" / "link.py").symlink_to(tmp_path / "folder" / "look.py")


def _run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **options
    )


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        pytest.param(["look.py", "-m", "--x"], ".", id="script"),
        pytest.param(["folder/look.py"], ".", id="in-a-folder"),
        pytest.param(["elsewhere/link.py"], ".", id="link"),
        pytest.param(["folder"], ".", id="folder"),
        pytest.param(["-m", "look", "a", "-m"], ".", id="module"),
        pytest.param(["-m", "package", "a"], "folder", id="package"),
        pytest.param(["-m", "package.look"], "folder", id="submodule"),
    ],
)
def test_a_program_finds_the_same_main_module_as_under_python(command: list[str], folder: str) -> None:
    ours = _run("-m", "polyxla.cli.script", *command, cwd=folder)
    pythons = _run(*command, cwd=folder)
    assert (ours.returncode, ours.stderr) == (0, "")
    seen, expected = json.loads(ours.stdout), json.loads(pythons.stdout)
    if command == ["folder"]:
        # Python gives the __main__ of a directory the spec of a module on the path.
        expected |= {"spec": None, "package": None}
    assert seen == expected
    assert seen["name"] == "__main__"
    assert seen["is main"]
    assert seen["pickles"]


def test_without_the_folder_on_the_path_the_first_entry_is_kept() -> None:
    (Path.cwd() / "look.py").write_text("import sys; print(sys.path[0])")
    safe = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": "first:second"}
    assert _run("-m", "polyxla.cli.script", "look.py", env=safe).stdout == _run("look.py", env=safe).stdout


@pytest.mark.parametrize("command", [["spawns.py"], ["-m", "spawns"]], ids=["script", "module"])
def test_spawned_workers_find_the_programs_functions(command: list[str]) -> None:
    (Path.cwd() / "spawns.py").write_text((PROGRAMS / "spawning_script.py").read_text())
    done = _run("-m", "polyxla.cli.script", *command)
    assert (done.stdout, done.stderr, done.returncode) == ("49\n", "", 0)


@pytest.mark.parametrize(
    ("code", "text", "exit_code"),
    [
        pytest.param(
            "from polyxla import UsageError\n\nraise UsageError('No', where='there', fix='Yes.')\n",
            "polyxla: error: No (from there). Yes.\n  at {path}:3\n",
            2,
            id="usage",
        ),
        pytest.param(
            "from polyxla import ReplicaLostError\nraise ReplicaLostError('process 1 was ended')\n",
            "polyxla: error: process 1 was ended\n  at {path}:2\n",
            1,
            id="lost-replica",
        ),
        pytest.param(
            "from polyxla import launch\n\ndef start():\n    launch(None)\n\n\nstart()\n",
            "polyxla: error: launch needs a function, not None (from train_fn). "
            "Pass the function itself, and its arguments as args=(...).\n"
            "  at {path}:4\n",
            2,
            id="innermost-line",
        ),
    ],
)
@pytest.mark.parametrize("command", [["wrong.py"], ["-m", "wrong"]], ids=["script", "module"])
def test_an_error_of_polyxla_is_printed_with_the_scripts_line(
    command: list[str], code: str, text: str, exit_code: int
) -> None:
    path = Path.cwd() / "wrong.py"
    path.write_text(code)
    done = _run("-m", "polyxla.cli.script", *command)
    assert (done.returncode, done.stdout) == (exit_code, "")
    assert done.stderr == text.format(path=path)


@pytest.mark.parametrize(
    "name", ["package.nosuch", "look.nosuch", "elsewhere"], ids=["missing", "of-a-module", "no-main"]
)
def test_a_module_that_cannot_be_run_is_an_error(name: str) -> None:
    (Path.cwd() / "package").mkdir()
    missing = f"{name}.__main__" if name == "elsewhere" else name
    done = _run("-m", "polyxla.cli.script", "-m", name)
    assert done.returncode == 2
    assert done.stderr == (
        f"polyxla: error: there is no module {missing!r} that can be run (from polyxla run -m). "
        "Write the name of a module, or of a package that has a __main__.py.\n"
    )


def test_an_import_error_inside_a_package_is_raised_unchanged() -> None:
    (Path.cwd() / "pack").mkdir()
    (Path.cwd() / "pack" / "__init__.py").write_text("import pac")
    done = _run("-m", "polyxla.cli.script", "-m", "pack.look")
    assert done.returncode == 1
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'pac'\n")


def test_a_syntax_error_is_pythons() -> None:
    (Path.cwd() / "wrong.py").write_text("def (:\n")
    done = _run("-m", "polyxla.cli.script", "wrong.py")
    assert done.returncode == 1
    assert "SyntaxError" in done.stderr
