"""A program in a fork of a warm process sees and does what it does after a cold start."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Machine

PROGRAMS = Path(__file__).parent / "programs"


def facts_of(machine: Machine, *program: Any, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    done = machine.run("run", *program, input="some text\n", **more)
    assert done.returncode == 0, done.stderr
    document, last = done.stdout.splitlines()
    assert last == "the exit function ran"
    found = json.loads(document)
    return found["facts"], found["drawn"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["script", pytest.param("module", marks=pytest.mark.long)])
def test_a_program_sees_what_it_sees_after_a_cold_start(machine: Machine, tmp_path: Path, how: str) -> None:
    program = [PROGRAMS / "facts.py", "--option", "x"] if how == "script" else ["-m", "facts"]
    (tmp_path / "facts.py").write_text((PROGRAMS / "facts.py").read_text())
    with (tmp_path / "file").open("w") as other:
        os.set_inheritable(other.fileno(), True)
        how_started: dict[str, Any] = {"cwd": tmp_path, "close_fds": False, "umask": 0o27}
        environ = {"OWN": "1", "TERM": "dumb"}
        cold, _ = facts_of(machine, *program, environ=environ, **how_started)
        assert machine.processes() == []
        machine.prepare()
        warm, first = facts_of(machine, *program, environ=environ, **how_started)
        again, second = facts_of(machine, *program, environ=environ, **how_started)
    assert machine.served() == 2
    assert warm == cold == again
    assert not first.items() & second.items()


@pytest.mark.parametrize("how", ["raise", "exit", "text", "SIGKILL", "SIGSEGV"])
def test_a_program_ends_as_after_a_cold_start(machine: Machine, how: str) -> None:
    cold = machine.run("run", PROGRAMS / "ends.py", how)
    machine.prepare()
    warm = machine.run("run", PROGRAMS / "ends.py", how)
    assert (warm.returncode, warm.stdout, warm.stderr) == (cold.returncode, cold.stdout, cold.stderr)
    assert warm.returncode != 0
    assert machine.served() == 1


def test_two_clients_run_at_once(warm: Machine) -> None:
    both = [warm.start("run", PROGRAMS / "waits.py") for _ in range(2)]
    pids = {int(process.stdout.readline()) for process in both if process.stdout}
    assert len(pids) == 2
    for process in both:
        process.terminate()
    assert [process.wait(60) for process in both] == [-15, -15]


def test_descriptors_of_the_shell_arrive(warm: Machine, tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text("import sys\nprint(open(sys.argv[1]).read(), end='')\n")
    line = f'"$@" run {tmp_path}/reads.py <(echo from the shell)'
    command = ["bash", "-c", line, "", *warm.command]
    done = subprocess.run(command, env=warm.environ, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "from the shell\n"
    assert warm.served() == 1
