"""The fork server and forks of this process."""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyxla import Replica, ReplicaLostError
from polyxla.contracts.job import ProcessMethod
from polyxla.launcher import start_methods
from polyxla.launcher.launch import run_replica
from polyxla.launcher.processes import run_processes
from polyxla.plugin import Job, Setting
from polyxla_testing.processes import (
    WAIT_S,
    wait_for_end_of,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("bare_runtime")


def _fail(replica: Replica) -> None:
    raise ZeroDivisionError("on purpose")


def test_a_fork_server_that_cannot_import_is_a_lost_replica(capfd: pytest.CaptureFixture[str]) -> None:
    job = Job(_fail, (), "bare", (0,), dict(os.environ), Setting(None, "default"), main=run_replica)
    with pytest.raises(ReplicaLostError, match="exited with code 1 before"):
        run_processes(job, [0], [os.environ], method="forkserver", preload=["no_such_module"])
    assert "No module named 'no_such_module'" in capfd.readouterr().err


def test_a_fork_server_imports_once_for_all(run_bare: Callable[..., list[Any]]) -> None:
    def look(_: Replica) -> tuple[int, bool]:
        return os.getppid(), "json.tool" in sys.modules

    (one, loaded), (other, loaded_too) = run_bare(look, size=2, method="forkserver")
    assert one == other != os.getpid()
    assert (loaded, loaded_too) == (True, True)


def test_variables_of_preloaded_modules_stay_unless_overridden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os; os.environ.update(FRESH='import', CHANGED='import', MINE='import')"
    (tmp_path / "setter.py").write_text(code)
    # A new process looks for modules where this one does.
    monkeypatch.syspath_prepend(tmp_path)

    def look(_: Replica) -> tuple[str, ...]:
        return os.environ["FRESH"], os.environ["CHANGED"], os.environ["MINE"]

    shared = {**os.environ, "CHANGED": "given"}
    job = Job(look, (), "bare", (0, 1), shared, Setting(None, "default"), main=run_replica)
    environs = [{**shared, "MINE": "0"}, {**shared, "MINE": "1"}]
    found = run_processes(job, [0, 1], environs, method="forkserver", preload=["setter"])
    # MINE of the first is what the server itself was started with, so the import's value is newer.
    values = [(result.ordinal, result.value) for result in found]
    assert values == [(0, ("import", "import", "import")), (1, ("import", "import", "1"))]


def test_a_fork_server_stays_for_the_next_launch_and_is_replaced_when_it_ended(
    run_bare: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parent(_: Replica) -> int:
        return os.getppid()

    def here(_: Replica) -> tuple[str, bool]:
        return str(Path.cwd()), str(tmp_path) in sys.path

    (first,) = run_bare(parent, method="forkserver")
    assert run_bare(parent, size=2, method="forkserver") == [first, first]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert run_bare(here, method="forkserver") == [(str(tmp_path), True)]
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while start_methods.running_fork_server(os.environ, ["json.tool"]).process.pid == first:
        assert time.monotonic() < deadline
    (second,) = run_bare(parent, method="forkserver")
    assert second != first


def test_replicas_end_with_their_fork_server_which_is_named(run_bare: Callable[..., list[Any]]) -> None:
    def kill_server(_: Replica) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(WAIT_S)

    text = r"process \d \(.*\) ended with its fork server \(pid \d+\), which was ended by SIGKILL"
    with pytest.raises(ReplicaLostError, match=text):
        run_bare(kill_server, size=2, method="forkserver")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_replicas_have_the_options_of_the_launching_python(method: str, tmp_path: Path) -> None:
    code = f"""
import os, sys
from polyxla.launcher.processes import run_processes
from polyxla.plugin import Job, Setting

def look(job, place):
    return sys.flags.optimize, sys.flags.dev_mode, sys.warnoptions[-1], sys.stdout.write_through

job = Job(print, (), "none", (0,), dict(os.environ), Setting(None, "default"), main=look)
print(run_processes(job, [0], [os.environ], method={method!r}))
"""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for options, seen in [
        (["-u", "-O", "-X", "dev", "-W", "error"], (1, True, "error", True)),
        (["-W", "ignore"], (0, False, "ignore", False)),
    ]:
        command = [sys.executable, *options, "-c", code]
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, check=True, timeout=WAIT_S
        )
        assert done.stdout == f"[{seen}]\n"


def test_a_fork_of_the_launching_process_has_a_server_of_its_own() -> None:
    code = """
import multiprocessing, os, sys
from polyxla.launcher.processes import run_processes
from polyxla.plugin import Job, Setting

def launch():
    parent = lambda *_: os.getppid()
    job = Job(print, (), "none", (0,), dict(os.environ), Setting(None, "default"), main=parent)
    return run_processes(job, [0], [os.environ], method="forkserver")

[server] = launch()
trial = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(launch() == [server]))
trial.start()
trial.join(60)
if (pid := os.fork()) == 0:
    sys.exit(0)
_, status = os.waitpid(pid, 0)
print(trial.exitcode, status, launch() == [server])
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * WAIT_S)
    assert (done.stdout, done.stderr) == ("0 0 True\n", "")


def test_replicas_are_forked_for_a_process_with_many_open_files(run_bare: Callable[..., list[Any]]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("a process may not have so many open files here")
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        for _ in range(1100):
            stack.enter_context(Path(os.devnull).open())
        # A server that started earlier has a low number.
        start_methods._close_servers()
        start_methods._servers.clear()
        assert run_bare(lambda replica: replica.ordinal, size=2, method="forkserver") == [0, 1]


def test_replicas_write_where_the_launching_process_writes_now(
    run_bare: Callable[..., list[Any]], method: ProcessMethod, tmp_path: Path
) -> None:
    def write(replica: Replica) -> None:
        os.write(1, b"output")
        os.write(2, b"error")

    run_bare(lambda _: None, method=method)
    kept = [os.dup(number) for number in (1, 2)]
    with (tmp_path / "output").open("w") as output, (tmp_path / "error").open("w") as error:
        os.dup2(output.fileno(), 1)
        os.dup2(error.fileno(), 2)
    try:
        run_bare(write, method=method)
    finally:
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
    assert [(tmp_path / name).read_text() for name in ("output", "error")] == ["output", "error"]


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize("output", [1, 2])
def test_replicas_start_for_a_process_without_output(method: str, output: int, tmp_path: Path) -> None:
    code = f"""
import os, pathlib
from polyxla.launcher.processes import run_processes
from polyxla.plugin import Job, Setting
os.close({output})
job = Job(print, (), "none", (0,), dict(os.environ), Setting(None, "default"), main=lambda *_: "returned")
found = run_processes(job, [0], [os.environ], method="{method}")
pathlib.Path({str(tmp_path / "found")!r}).write_text(found[0])
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)
    assert (tmp_path / "found").read_text() == "returned"


def test_an_idle_fork_server_ends() -> None:
    code = "import polyxla.launcher.fork_server as server, sys; server.IDLE_S = 0.3; server.main()"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", code, "", f"[{theirs.fileno()}]", "[]"]
    with ours, theirs:
        subprocess.run(command, pass_fds=[theirs.fileno()], timeout=WAIT_S, check=True)


def test_a_fork_server_ends_with_its_parent(tmp_path: Path) -> None:
    code = """
import os
from polyxla.launcher.start_methods import running_fork_server
print(running_fork_server(os.environ, ["json.tool"]).process.pid)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    wait_for_end_of([int(done.stdout)])


def test_a_fork_server_that_nobody_used_ends_while_it_imports(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    code = """
import os
from polyxla.launcher.start_methods import running_fork_server
print(running_fork_server(os.environ, ["slow"]).process.pid)
"""
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    wait_for_end_of([int(done.stdout)])


def test_a_fork_has_what_this_process_made_and_leaves_its_exit_hooks(
    run_bare: Callable[..., list[Any]], tmp_path: Path
) -> None:
    lock = threading.Lock()

    def leave(name: str) -> None:
        (tmp_path / f"{name}-{os.getpid()}").touch()

    def use(replica: Replica) -> int:
        atexit.register(leave, "own")
        with lock:
            return os.getpid()

    atexit.register(leave, "parent's")
    try:
        pids = run_bare(use, size=2, method="fork")
    finally:
        atexit.unregister(leave)
    assert sorted(path.name for path in tmp_path.glob("*-*")) == sorted(f"own-{pid}" for pid in pids)


def test_a_fork_server_that_is_importing_ends_with_the_launching_process(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    (tmp_path / "slow.py").write_text(
        f"import os, pathlib, time; pathlib.Path('{pid}.new').write_text(str(os.getpid()))\n"
        f"os.rename('{pid}.new', '{pid}'); time.sleep(300)"
    )
    code = "import os, time; from polyxla.launcher.start_methods import running_fork_server\n"
    code += "server = running_fork_server(os.environ, ['slow']); time.sleep(300)"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    launching = subprocess.Popen([sys.executable, "-c", code], env=environ)
    wait_until(pid.exists, "the import")
    launching.kill()
    launching.wait(WAIT_S)
    wait_for_end_of([int(pid.read_text())])
