"""A warm process never runs what would be another program after a cold start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polyxla import UsageError
from polyxla_testing.processes import wait_for_end_of, wait_until
from polyxla_tools.warm.facts import autogroup_priority
from polyxla_tools.warm.imports import Reads, relevant
from polyxla_tools.warm.sockets import find_sockets, new_socket

if TYPE_CHECKING:
    from conftest import Machine

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def package(machine: Machine, tmp_path: Path) -> Path:
    """The source of a package on the module search path, and a program that prints its content."""
    (tmp_path / "source").mkdir()
    (tmp_path / "run.py").write_text("import itself; print(itself.CONTENT)\n")
    source = tmp_path / "source" / "itself.py"
    source.write_text("CONTENT = 'first'\n")
    machine.environ["PYTHONPATH"] = str(source.parent)
    return source


@pytest.mark.slow
def test_an_edited_package_is_imported_afresh_and_the_process_renews_itself(
    machine: Machine, package: Path
) -> None:
    first = machine.prepare("itself")
    program = package.parent.parent / "run.py"
    assert machine.run("run", program).stdout == "first\n"
    assert machine.served() == 1
    package.write_text("CONTENT = 'changed'\n")
    done = machine.run("run", program)
    assert done.stdout == "changed\n"
    assert done.stderr == (
        f"polyxla: warm: {package} has changed since it was imported; it renews itself; this start is cold\n"
    )
    wait_for_end_of([first])
    wait_until(lambda: len(machine.processes()) == 1, "the new process is ready")
    done = machine.run("run", program)
    assert (done.stdout, done.stderr) == ("changed\n", "")
    assert machine.served() == 1


@pytest.mark.slow
def test_a_changed_variable_starts_cold(warm: Machine) -> None:
    done = warm.run("run", PROGRAMS / "ends.py", "exit", environ={"OMP_NUM_THREADS": "7"})
    assert done.returncode == 3
    assert "warm: OMP_NUM_THREADS=7 here, OMP_NUM_THREADS is not set there; this start is cold" in done.stderr
    # A program that imports scikit-learn before it launches has the second.
    for harmless in ({"OWN": "7"}, {"KMP_INIT_AT_FORK": "FALSE"}):
        assert warm.run("run", PROGRAMS / "ends.py", "exit", environ=harmless).returncode == 3
    assert warm.served() == 2


@pytest.mark.slow
def test_each_environment_has_a_process_of_its_own(machine: Machine) -> None:
    pids = {machine.prepare(), machine.prepare(OMP_NUM_THREADS="7")}
    assert {process["pid"] for process in machine.processes()} == pids
    for environ in ({}, {"OMP_NUM_THREADS": "7"}):
        done = machine.run("run", PROGRAMS / "ends.py", "exit", environ=environ)
        assert (done.returncode, done.stderr) == (3, "")
    assert [process["jobs_served"] for process in machine.processes()] == [1, 1]


def test_a_module_of_the_program_is_not_shadowed_by_one_of_the_process(
    machine: Machine, package: Path, tmp_path: Path
) -> None:
    machine.prepare("itself")
    (tmp_path / "itself.py").write_text("CONTENT = 'its own'\n")
    done = machine.run("run", tmp_path / "run.py")
    assert done.stdout == "its own\n"
    assert f"{tmp_path / 'itself.py'} would be imported" in done.stderr


def _sh(line: str) -> list[str]:
    return ["sh", "-c", f'{line}; exec "$@"', "-"]


@pytest.mark.parametrize(
    ("before", "differs"),
    [
        (["taskset", "-c", "0"], "CPUs"),
        (["prlimit", "--stack=4194304"], "stack limit"),
        (["setpriv", "--bounding-set=-all"], r"Cap\w+ of /proc/self/status"),
        (["setpriv", "--no-new-privs"], "NoNewPrivs of /proc/self/status"),
        (["setpriv", "--securebits=+no_setuid_fixup"], "securebits"),
        (["setpriv", "--groups=1"], "user and groups"),
        (["ionice", "-c", "3"], "I/O priority"),
        (["chrt", "--batch", "0"], "scheduling policy"),
        (["setarch", "-R"], "personality"),
        (["unshare", "--uts"], "namespaces"),
        (_sh("echo 500 > /proc/self/oom_score_adj"), "adjustment of the out-of-memory score"),
        (_sh("echo 7 > /proc/self/coredump_filter"), "filter of core dumps"),
    ],
)
def test_other_surroundings_are_refused(warm: Machine, before: list[str], differs: str) -> None:
    reasons = "import os; from polyxla_tools.warm.client import misfits; print(misfits(dict(os.environ), []))"
    tried = subprocess.run([*before, "true"], capture_output=True, text=True, timeout=60, check=False)
    if tried.returncode:
        pytest.skip(tried.stderr)
    command = [*before, sys.executable, "-c", reasons]
    done = subprocess.run(command, env=warm.environ, capture_output=True, text=True, timeout=60, check=True)
    assert re.fullmatch(rf"\['not the same {differs} as the warm process'\]\n", done.stdout), done.stdout


@pytest.mark.parametrize(
    ("text", "priority"),
    [(None, "0"), ("", "0"), ("/autogroup-3150 nice 0\n", "0"), ("/autogroup-7 nice -5\n", "-5")],
)
def test_a_session_without_an_autogroup_has_the_usual_priority(text: str | None, priority: str) -> None:
    assert autogroup_priority(text) == priority


@pytest.mark.parametrize("before", [["setpriv", "--no-new-privs"], ["setpriv", "--bounding-set=-all"]])
def test_dropped_privileges_stay_dropped(warm: Machine, tmp_path: Path, before: list[str]) -> None:
    program = tmp_path / "prints.py"
    program.write_text("print(open('/proc/self/status').read())")
    command = [*before, *warm.command, "run", str(program)]
    done = subprocess.run(command, env=warm.environ, capture_output=True, text=True, timeout=60, check=True)
    assert "as the warm process; this start is cold" in done.stderr
    plain = subprocess.run([*before, "cat", "/proc/self/status"], capture_output=True, text=True, check=True)
    for name in ("NoNewPrivs", "CapBnd", "CapEff"):
        found, wanted = (re.findall(rf"\n{name}:.*\n", text) for text in (done.stdout, plain.stdout))
        assert found == wanted


def test_a_process_that_was_moved_is_refused(machine: Machine) -> None:
    server = machine.prepare()
    os.sched_setaffinity(server, [0])
    done = machine.run("run", PROGRAMS / "ends.py", "exit")
    assert done.returncode == 3
    assert "not the same CPUs as the warm process; this start is cold" in done.stderr


def test_another_users_directory_is_refused(machine: Machine) -> None:
    machine.directory.mkdir(mode=0o700)
    os.chown(machine.directory, 65534, -1)
    with pytest.raises(UsageError, match=r"belongs to user 65534, not mode 700 and user"):
        find_sockets(machine.environ)
    done = machine.run("run", PROGRAMS / "ends.py", "exit")
    assert done.returncode == 3
    assert "Remove it, or set XDG_RUNTIME_DIR to a directory of yours. This start is cold." in done.stderr
    assert machine.run("warm", "on").returncode == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_directory_in_another_users_is_none(tmp_path: Path) -> None:
    # As sudo leaves XDG_RUNTIME_DIR.
    (tmp_path / "closed").mkdir(mode=0o700)
    os.seteuid(65534)
    try:
        assert find_sockets({"XDG_RUNTIME_DIR": str(tmp_path / "closed")}) == []
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("kind", ["open", "link"])
def test_a_directory_that_is_not_private_is_refused(machine: Machine, tmp_path: Path, kind: str) -> None:
    if kind == "open":
        machine.directory.mkdir()
        machine.directory.chmod(0o750)
    else:
        machine.directory.symlink_to(tmp_path)
    with pytest.raises(UsageError, match="has mode 750" if kind == "open" else "is not a directory"):
        new_socket(machine.environ, os.getpid())


def test_a_process_whose_imports_start_threads_is_refused(machine: Machine, package: Path) -> None:
    package.write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
    )
    with pytest.raises(Exception, match=r"importing has started 1 thread\(s\)"):
        machine.prepare("itself")
    package.write_text("raise ValueError('as asked')")
    with pytest.raises(Exception, match="ValueError: as asked"):
        machine.prepare("itself")
    assert not machine.directory.exists() or not list(machine.directory.iterdir())


@pytest.mark.slow
def test_an_upgraded_wheel_is_imported_afresh(machine: Machine, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", system_site_packages=False, with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    # Polyxla and the rest come from this environment.
    (site / "outer.pth").write_text("\n".join(path for path in sys.path if path.startswith("/")))
    (tmp_path / "run.py").write_text("import upgraded; print(upgraded.VERSION)\n")
    install = [python, "-m", "pip", "install", "-q", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*install, _wheel(tmp_path, "1")], check=True, timeout=60)
    start = "import os; from polyxla_tools.warm.preparation import *; "
    start += "start(Options('pjrt', ('upgraded',), 60), dict(os.environ))"
    subprocess.run([python, "-c", start], env=machine.environ, check=True, timeout=60)
    run = [python, "-m", "polyxla", "run", str(tmp_path / "run.py")]
    outputs = []
    for version in ("1", "2"):
        subprocess.run([*install, _wheel(tmp_path, version)], check=True, timeout=60)
        outputs.append(
            subprocess.run(run, env=machine.environ, capture_output=True, text=True, timeout=60, check=True)
        )
    assert [done.stdout for done in outputs] == ["1\n", "2\n"]
    assert outputs[0].stderr == ""
    assert "it renews itself; this start is cold" in outputs[1].stderr


def _wheel(directory: Path, version: str) -> str:
    """Build a wheel with one module."""
    path = directory / f"upgraded-{version}-py3-none-any.whl"
    info = f"upgraded-{version}.dist-info"
    files = {
        "upgraded.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: upgraded\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)
    return str(path)


def test_variables_that_torchtpu_reads_when_it_is_imported_must_be_the_same() -> None:
    # With the first, which `polyxla fits` sets, it waits for each operation.
    environ = {"TORCH_TPU_LAUNCH_BLOCKING": "1", "TORCH_TPU_TOPOLOGY": "2,2,1"}
    assert relevant(Reads(), environ) == {"TORCH_TPU_LAUNCH_BLOCKING"}
