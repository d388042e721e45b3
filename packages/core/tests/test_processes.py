"""Real processes: results in order, errors whole, and nobody left behind."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from polyxla import Job, Replica, ReplicaLostError, Setting, StalledError, UsageError, env
from polyxla.contracts.job import ProcessMethod
from polyxla.launcher import child, failures, processes, start_methods
from polyxla.launcher.failures import PARENT_GONE
from polyxla.launcher.messages import Message, ReplicaFailedError, Setup
from polyxla.launcher.messages import RemoteTraceback
from polyxla.launcher.processes import run_inline, run_processes
from polyxla.launcher.replica_main import run_replica
from polyxla.launcher.start_methods import spawn
from polyxla.testing import PluginInstaller

PATIENCE_S = 60.0
# A runtime without torch: one process a device, and connections that only know their ordinal.
BARE = """
import os
from polyxla import Claim, Device, Discovery, Replication, World, hookimpl
from polyxla.launcher.replica_main import run_replica
from polyxla.launcher.processes import run_processes

@hookimpl
def polyxla_discover_devices():
    devices = tuple(Device(index, "BARE", f"bare device {index}") for index in range(4))
    return Discovery(Claim.EXPLICIT, "the test", "BARE", devices)

@hookimpl
def polyxla_launch(job):
    environs = [{**job.environ, "BARE_ORDINAL": str(ordinal)} for ordinal in range(len(job.devices))]
    return run_processes(job, range(len(job.devices)), environs)

Bare = type("Bare", (Replication,), dict.fromkeys(Replication.__abstractmethods__, lambda self, *_: None))

@hookimpl
def polyxla_replication(job, place):
    bare = Bare()
    size = len(job.devices)
    bare.world = World(size, place, place, size, place, size)
    return bare
"""


@pytest.fixture(autouse=True)
def _bare(install_plugin: PluginInstaller) -> Iterator[None]:
    install_plugin.hide_others()
    install_plugin("bare", BARE)
    # Children cannot import a test module.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def _run(
    function: Callable[..., Any], *args: Any, size: int = 1, method: ProcessMethod = "spawn", **environ: str
) -> list[Any]:
    whole = {**os.environ, **environ}
    job = Job(function, args, "bare", tuple(range(size)), whole, Setting(None, "default"), main=run_replica)
    environs = [{**whole, "MINE": str(ordinal)} for ordinal in range(size)]
    return run_processes(job, range(size), environs, method=method, preload=["json.tool"])


every_method = pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])


def _wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"no {paths}"
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie that init has not reaped yet has ended, too.
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def _wait_for_state(state: str, pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while f"\nState:\t{state}" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline, f"{pid} is not in state {state}"
        time.sleep(0.01)


def _wait_for_end_of(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(_is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} still live"
        time.sleep(0.01)


def _answer_in_reverse(replica: Replica, folder: Path) -> tuple[int, int, str]:
    if replica.ordinal + 1 < replica.world_size:
        _wait_for(folder / str(replica.ordinal + 1))
    (folder / str(replica.ordinal)).touch()
    return replica.ordinal, os.getpid(), os.environ["MINE"]


@every_method
def test_results_come_in_order_whoever_answers_first(method: ProcessMethod, tmp_path: Path) -> None:
    ordinals, pids, mine = zip(*_run(_answer_in_reverse, tmp_path, size=3, method=method), strict=True)
    assert ordinals == (0, 1, 2)
    assert mine == ("0", "1", "2")
    assert len({*pids, os.getpid()}) == 4
    assert not any(_is_alive(pid) for pid in pids)


def test_the_parents_environment_stays_and_the_childs_is_as_given() -> None:
    before = dict(os.environ)

    def change(_: Replica) -> tuple[str | None, str]:
        os.environ["BEFORE"] = "changed"
        return os.environ.get("PYTEST_CURRENT_TEST"), os.environ["GIVEN"]

    environ = {"PYTHONPATH": os.environ["PYTHONPATH"], "GIVEN": "yes"}
    job = Job(change, (), "bare", (0,), environ, Setting(None, "default"), main=run_replica)
    assert run_processes(job, [0], [environ]) == [(None, "yes")]
    assert dict(os.environ) == before


def test_a_child_starts_clean() -> None:
    def look(_: Replica) -> tuple[list[str], list[str], str]:
        return sys.argv, sys.path, sys.stdin.read()

    assert _run(look) == [([""], sys.path, "")]


def test_lambdas_and_closures_travel() -> None:
    offset = 40
    assert _run(lambda replica, more: replica.ordinal + offset + more, 2, size=2) == [42, 43]


def _fail(replica: Replica) -> None:
    raise ZeroDivisionError("on purpose")


@every_method
def test_an_exception_keeps_its_type_its_note_and_its_traceback(method: ProcessMethod) -> None:
    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        _run(_fail, method=method)
    (note,) = caught.value.__notes__
    assert note.startswith("raised in the replica with ordinal 0 on ")
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert "in _fail" in str(cause)
    assert str(cause).rstrip().endswith(f"ZeroDivisionError: on purpose\n{note}")


def test_a_usage_error_keeps_its_note() -> None:
    def refuse(_: Replica) -> None:
        raise UsageError("no", where="there", fix="Yes.")

    with pytest.raises(UsageError, match=r"^no \(from there\)\. Yes\.") as caught:
        _run(refuse)
    assert caught.value.__notes__[0].startswith("raised in the replica with ordinal 0 on ")


@every_method
def test_an_exit_of_the_function_is_an_exit_here(method: ProcessMethod) -> None:
    with pytest.raises(SystemExit) as caught:
        _run(lambda _: sys.exit(7), method=method)
    assert caught.value.code == 7


class _OwnInitError(Exception):
    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"code {code} at {where}")


def test_an_exception_that_does_not_load_again_comes_in_words() -> None:
    def fail(_: Replica) -> None:
        raise _OwnInitError(3, "the start")

    with pytest.raises(ReplicaFailedError) as caught:
        _run(fail)
    assert "_OwnInitError: code 3 at the start\nraised in the replica with ordinal 0" in str(caught.value)
    assert "in fail" in str(caught.value.__cause__)


@every_method
def test_an_exception_that_does_not_pickle_comes_in_words(method: ProcessMethod) -> None:
    def fail(_: Replica) -> None:
        raise ValueError("holds a lock", threading.Lock())

    with pytest.raises(ReplicaFailedError, match=r"ValueError: \('holds a lock', <unlocked"):
        _run(fail, method=method)


@every_method
@pytest.mark.parametrize(
    ("end", "how"),
    [
        pytest.param(
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            "was ended by SIGKILL (often the kernel, when memory runs out; its peak was {peak} MiB)",
            id="killed",
        ),
        pytest.param(lambda: os.kill(os.getpid(), signal.SIGSEGV), "was ended by SIGSEGV", id="crashed"),
        pytest.param(lambda: os._exit(9), "exited with code 9", id="exited"),
        pytest.param(lambda: os._exit(0), "exited with code 0", id="exited-with-0"),
    ],
)
def test_a_replica_that_dies_is_named_with_how(
    method: ProcessMethod, end: Callable[[], None], how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its closed pipe must tell, without looking.
    monkeypatch.setattr(processes, "_check_alive", lambda _: pytest.fail("nobody noticed"))
    monkeypatch.setattr(processes, "LIVENESS_CHECK_S", PATIENCE_S)

    def die(replica: Replica) -> None:
        if replica.ordinal == 1:
            (tmp_path / "pid").write_text(str(os.getpid()))
            end()
        time.sleep(PATIENCE_S)

    with pytest.raises(ReplicaLostError) as caught:
        _run(die, size=2, method=method)
    pid = (tmp_path / "pid").read_text()
    text = str(caught.value)
    peak = re.search(r"peak was (\d+) MiB", text)
    # A Python needs 5 MiB at least; a figure in the wrong unit would be far off.
    assert peak is None or 5 < int(peak[1]) < 5000
    assert text == f"process 1 (pid {pid}) {how.format(peak=peak and peak[1])} before it returned a result"
    assert caught.value.exit_code == 1


@every_method
def test_a_lost_replica_is_seen_while_a_process_it_forked_lives_on(
    method: ProcessMethod, tmp_path: Path
) -> None:
    def fork_and_die(_: Replica) -> None:
        if (pid := os.fork()) == 0:
            time.sleep(10 * PATIENCE_S)
            os._exit(0)
        (tmp_path / "pid").write_text(str(pid))
        os.kill(os.getpid(), signal.SIGKILL)

    def end_the_forked_one() -> None:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    # Its end closes the pipe, which would make up for a loss that is not seen.
    rescue = threading.Timer(PATIENCE_S, end_the_forked_one)
    rescue.start()
    try:
        with pytest.raises(ReplicaLostError, match="was ended by SIGKILL"):
            _run(fork_and_die, method=method)
        assert rescue.is_alive(), "seen only when the forked process ended"
    finally:
        rescue.cancel()
        rescue.join()
        with contextlib.suppress(ProcessLookupError):
            end_the_forked_one()


@every_method
def test_when_one_fails_the_others_are_ended(method: ProcessMethod, tmp_path: Path) -> None:
    def wait_or_fail(replica: Replica) -> None:
        (tmp_path / f"{replica.ordinal}.part").write_text(str(os.getpid()))
        (tmp_path / f"{replica.ordinal}.part").rename(tmp_path / f"{replica.ordinal}.pid")
        if replica.ordinal == 1:
            _wait_for(tmp_path / "0.pid", tmp_path / "2.pid")
            raise ZeroDivisionError
        time.sleep(PATIENCE_S)

    with pytest.raises(ZeroDivisionError):
        _run(wait_or_fail, size=3, method=method)
    pids = [int((tmp_path / f"{ordinal}.pid").read_text()) for ordinal in range(3)]
    assert not any(_is_alive(pid) for pid in pids)


@every_method
def test_one_that_ignores_being_ended_is_killed(
    method: ProcessMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ignore_or_fail(replica: Replica) -> None:
        if replica.ordinal == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (tmp_path / "part").write_text(str(os.getpid()))
            (tmp_path / "part").rename(tmp_path / "pid")
            time.sleep(PATIENCE_S)
        _wait_for(tmp_path / "pid")
        raise ZeroDivisionError

    monkeypatch.setattr(processes, "STOP_GRACE_S", 0.1)
    with pytest.raises(ZeroDivisionError):
        _run(ignore_or_fail, size=2, method=method)
    assert not _is_alive(int((tmp_path / "pid").read_text()))


FIX = (
    "Make what cannot be sent (locks, open files, generators, loaders' iterators) inside "
    "the function, or run one replica with start_method='inline'."
)


def test_a_function_that_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()

    def train(_: Replica) -> None:
        lock.acquire()

    with pytest.raises(UsageError) as caught:
        _run(train)
    name = f"{test_a_function_that_cannot_be_sent_is_named.__name__}.<locals>.train"
    assert str(caught.value) == (
        f"train_fn ({name}) cannot be sent to another process: "
        f"cannot pickle '_thread.lock' object (from launch). {FIX}"
    )


@pytest.mark.parametrize(
    ("args", "culprit", "reason"),
    [
        pytest.param((1, threading.Lock()), "args[1]", "cannot pickle '_thread.lock' object", id="lock"),
        pytest.param(
            ((n for n in range(3)), 1), "args[0]", "cannot pickle 'generator' object", id="generator"
        ),
    ],
)
def test_arguments_that_cannot_be_sent_are_named(args: tuple[Any, ...], culprit: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        _run(_fail, *args)
    assert str(caught.value) == f"{culprit} cannot be sent to another process: {reason} (from launch). {FIX}"


def test_a_place_that_cannot_be_sent_is_not_blamed_on_the_function() -> None:
    job = Job(_fail, (), "bare", (0,), {}, Setting(None, "default"), main=run_replica)
    with pytest.raises(UsageError, match="the job cannot be sent to another process: "):
        run_processes(job, [threading.Lock()], [{}])


class _DoesNotLoad:
    def __reduce__(self) -> tuple[Any, ...]:
        return (int, ("not a number",))


@every_method
@pytest.mark.parametrize(
    ("make", "text"),
    [
        pytest.param(
            lambda: [threading.Lock()],
            "the function's result (list) cannot be sent back: cannot pickle '_thread.lock' object",
            id="does-not-pickle",
        ),
        pytest.param(
            _DoesNotLoad,
            "the function's result cannot be read here: ValueError: "
            "invalid literal for int() with base 10: 'not a number'",
            id="does-not-load",
        ),
    ],
)
def test_a_result_that_cannot_come_back(method: ProcessMethod, make: Callable[[], Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        _run(lambda _: make(), method=method)
    assert str(caught.value) == (
        f"{text} (from launch). Return numbers, strings, CPU tensors, or collections of them."
    )


def test_a_child_that_never_says_hello(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import time; time.sleep({PATIENCE_S})")
    with pytest.raises(ReplicaLostError) as caught:
        _run(_fail, PYTHONPATH=str(tmp_path), POLYXLA_START_TIMEOUT_S="0.5")
    before, _, after = str(caught.value).partition(" (pid ")
    pid, _, text = after.partition(") ")
    assert before == "process 0"
    assert text == "did not answer within 0.5 s of its start; POLYXLA_START_TIMEOUT_S sets the limit"
    assert not _is_alive(int(pid))


def test_a_child_that_cannot_even_start() -> None:
    with pytest.raises(ReplicaLostError, match=r"process 0 \(pid \d+\) exited with code 1 before"):
        _run(_fail, PYTHONHOME="/nonexistent")


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [({}, 120.0), ({"POLYXLA_START_TIMEOUT_S": ""}, 120.0), ({"POLYXLA_START_TIMEOUT_S": "0.5"}, 0.5)],
    ids=["default", "empty", "half-a-second"],
)
def test_the_start_timeout(environ: Mapping[str, str], seconds: float) -> None:
    assert env.timeout_s(environ, env.POLYXLA_START_TIMEOUT_S) == seconds


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf"])
def test_a_start_timeout_that_is_none(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        _run(_fail, POLYXLA_START_TIMEOUT_S=text)
    assert str(caught.value) == (
        f"POLYXLA_START_TIMEOUT_S={text} is not a positive number of seconds (from the environment). "
        "Write POLYXLA_START_TIMEOUT_S=120."
    )


def test_inline_runs_here_with_the_jobs_environment() -> None:
    before = dict(os.environ)
    job = Job(
        lambda replica, name: (os.getpid(), replica.ordinal, os.environ[name]),
        ("LENT",),
        "bare",
        (0,),
        {**os.environ, "LENT": "yes"},
        Setting(None, "default"),
        main=run_replica,
    )
    assert run_inline(job, 0) == [(os.getpid(), 0, "yes")]
    assert dict(os.environ) == before


SCRIPT = """
from polyxla import launch

class ScriptError(Exception):
    pass

def helper(n):
    return n + 1

def train(replica, fails):
    if fails:
        raise ScriptError("from a replica")
    return helper(replica.ordinal)

assert launch(train, (False,), devices=2) == [1, 2]
assert launch(lambda replica: helper(replica.ordinal), devices=2) == [1, 2]
try:
    launch(train, (True,), devices=1)
except ScriptError as error:
    print("caught", error)
"""


def test_functions_and_exceptions_of_a_script_travel_without_a_main_guard(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("caught from a replica\n", "", 0)


ORPHANS = """
import os, time
from polyxla import launch

def train(replica):
    path = os.path.join(os.environ["FOLDER"], str(replica.ordinal))
    with open(path + ".part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + ".part", path + ".pid")
    time.sleep(600)

launch(train, devices=2)
"""


def test_children_do_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ORPHANS)
    parent = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, env={**os.environ, "FOLDER": str(tmp_path)}
    )
    files = [tmp_path / "0.pid", tmp_path / "1.pid"]
    try:
        _wait_for(*files)
    finally:
        parent.kill()
        parent.wait(PATIENCE_S)
    pids = [int(file.read_text()) for file in files]
    try:
        _wait_for_end_of(pids)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_child_whose_parent_closes_the_pipe_leaves_with_its_own_code() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = spawn(theirs, os.environ)
    theirs.close()
    assert ours.recv() == Message("hello")
    job = Job(
        lambda _: time.sleep(PATIENCE_S), (), "bare", (0,), {}, Setting(None, "default"), main=run_replica
    )
    ours.send(Setup(dict(os.environ), sys.path, ".", cloudpickle.dumps((job, 0))))
    ours.close()
    end = process.wait(time.monotonic() + PATIENCE_S)
    assert end is not None
    assert end.code == PARENT_GONE


@every_method
def test_stalled_replicas_are_shown_and_ended(
    method: ProcessMethod, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dawdle(replica: Replica) -> None:
        (tmp_path / f"{replica.ordinal}.part").write_text(str(os.getpid()))
        (tmp_path / f"{replica.ordinal}.part").rename(tmp_path / f"{replica.ordinal}.pid")
        if replica.ordinal == 1:
            _wait_for(tmp_path / "0.pid", tmp_path / "2.pid")
            _wait_for_state("T", int((tmp_path / "2.pid").read_text()))
            failures.report_stall("all-reduce of step, for 3 s\nand more")
        if replica.ordinal == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(PATIENCE_S)

    monkeypatch.setattr(failures, "POSITION_WAIT_S", 2.0)
    with pytest.raises(StalledError) as caught:
        _run(dawdle, size=3, method=method)
    text = str(caught.value)
    assert "waited too long for other replicas: all-reduce of step, for 3 s; the position of each" in text
    shown = capfd.readouterr().err
    assert "process 1 (pid" in shown.split("stalls:\nall-reduce of step, for 3 s\nand more", 1)[0]
    position = shown.partition("polyxla: process 0 (pid")[2].partition("polyxla: process 2")[0]
    assert "thread MainThread:" in position
    assert "in dawdle" in position
    assert "did not report its position within 2 s: its Python does not run" in shown


def test_a_fork_server_that_cannot_import_is_a_lost_replica(capfd: pytest.CaptureFixture[str]) -> None:
    job = Job(_fail, (), "bare", (0,), dict(os.environ), Setting(None, "default"), main=run_replica)
    with pytest.raises(ReplicaLostError, match="exited with code 1 before"):
        run_processes(job, [0], [os.environ], method="forkserver", preload=["no_such_module"])
    assert "No module named 'no_such_module'" in capfd.readouterr().err


def test_a_fork_server_imports_once_for_all() -> None:
    def look(_: Replica) -> tuple[int, bool]:
        return os.getppid(), "json.tool" in sys.modules

    (one, loaded), (other, loaded_too) = _run(look, size=2, method="forkserver")
    assert one == other != os.getpid()
    assert (loaded, loaded_too) == (True, True)


def test_what_a_preloaded_module_sets_stays_unless_a_process_is_to_have_another(
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
    assert found == [("import", "import", "import"), ("import", "import", "1")]


def test_a_fork_server_stays_for_the_next_launch_and_is_replaced_when_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parent(_: Replica) -> int:
        return os.getppid()

    def here(_: Replica) -> tuple[str, bool]:
        return str(Path.cwd()), str(tmp_path) in sys.path

    (first,) = _run(parent, method="forkserver")
    assert _run(parent, size=2, method="forkserver") == [first, first]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert _run(here, method="forkserver") == [(str(tmp_path), True)]
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while start_methods.running_fork_server(os.environ, ["json.tool"]).process.pid == first:
        assert time.monotonic() < deadline
    (second,) = _run(parent, method="forkserver")
    assert second != first


def test_an_idle_fork_server_ends() -> None:
    code = "import polyxla.launcher.fork_server as server, sys; server.IDLE_S = 0.3; server.main()"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", code, "", f"[{theirs.fileno()}]", "[]"]
    with ours, theirs:
        subprocess.run(command, pass_fds=[theirs.fileno()], timeout=PATIENCE_S, check=True)


def test_a_fork_server_ends_with_its_parent(tmp_path: Path) -> None:
    code = """
import os
from polyxla.launcher.start_methods import running_fork_server
print(running_fork_server(os.environ, ["json.tool"]).process.pid)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    _wait_for_end_of([int(done.stdout)])


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
    _wait_for_end_of([int(done.stdout)])


def test_a_fork_has_what_this_process_made_and_leaves_its_exit_hooks(tmp_path: Path) -> None:
    lock = threading.Lock()

    def leave(name: str) -> None:
        (tmp_path / f"{name}-{os.getpid()}").touch()

    def use(replica: Replica) -> int:
        atexit.register(leave, "own")
        with lock:
            return os.getpid()

    atexit.register(leave, "parent's")
    try:
        pids = _run(use, size=2, method="fork")
    finally:
        atexit.unregister(leave)
    assert sorted(path.name for path in tmp_path.glob("*-*")) == sorted(f"own-{pid}" for pid in pids)
