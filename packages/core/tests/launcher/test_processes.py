"""Replicas as processes: results, environments, what can be sent, and how they end."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from polyxla import Replica, ReplicaLostError, UsageError
from polyxla.contracts.job import ProcessMethod
from polyxla.launcher import processes, start_methods
from polyxla.launcher.launch import run_replica
from polyxla.launcher.process_handle import Process
from polyxla.launcher.processes import run_inline, run_processes
from polyxla.plugin import Job, Setting, env
from polyxla_testing.processes import (
    WAIT_S,
    is_alive,
    printed_by,
    wait_for_end_of,
    wait_for_files,
)

pytestmark = pytest.mark.usefixtures("bare_runtime")

PROGRAMS = Path(__file__).parent.parent / "programs"


def _answer_in_reverse(replica: Replica, folder: Path) -> tuple[int, int, str]:
    if replica.ordinal + 1 < replica.world_size:
        wait_for_files(folder / str(replica.ordinal + 1))
    (folder / str(replica.ordinal)).touch()
    return replica.ordinal, os.getpid(), os.environ["MINE"]


def test_results_come_in_order_whoever_answers_first(
    run_bare: Callable[..., list[Any]], method: ProcessMethod, tmp_path: Path
) -> None:
    ordinals, pids, mine = zip(*run_bare(_answer_in_reverse, tmp_path, size=3, method=method), strict=True)
    assert ordinals == (0, 1, 2)
    assert mine == ("0", "1", "2")
    assert len({*pids, os.getpid()}) == 4
    assert not any(is_alive(pid) for pid in pids)


def test_each_process_has_its_own_environment() -> None:
    before = dict(os.environ)

    def change(_: Replica) -> tuple[str | None, str]:
        os.environ["BEFORE"] = "changed"
        return os.environ.get("PYTEST_CURRENT_TEST"), os.environ["GIVEN"]

    environ = {"PYTHONPATH": os.environ["PYTHONPATH"], "GIVEN": "yes"}
    job = Job(change, (), "bare", (0,), environ, Setting(None, "default"), main=run_replica)
    [result] = run_processes(job, [0], [environ])
    assert result.value == (None, "yes")
    assert dict(os.environ) == before


def test_a_replica_process_has_the_launching_processs_arguments(run_bare: Callable[..., list[Any]]) -> None:
    def look(_: Replica) -> tuple[list[str], list[str], str]:
        return sys.argv, sys.path, sys.stdin.read()

    assert run_bare(look) == [(sys.argv, sys.path, "")]


def test_an_entry_of_the_path_that_is_no_string_is_harmless(
    run_bare: Callable[..., list[Any]], method: ProcessMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    # Only a new server is told the path.
    monkeypatch.setattr(start_methods, "_servers", {})
    assert run_bare(lambda replica: replica.ordinal, method=method) == [0]
    start_methods._close_servers()


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler], ids=["ignored", "usual"])
def test_programs_that_replicas_start_take_ctrl_c_as_those_of_the_launching_process(
    run_bare: Callable[..., list[Any]], method: ProcessMethod, handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: Replica) -> tuple[str, str]:
        code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
        (read, write), pid = os.pipe(), os.fork()
        if pid == 0:
            os.write(write, str(signal.getsignal(signal.SIGINT) is signal.SIG_IGN).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        return printed_by(code).strip(), os.read(read, 9).decode()

    monkeypatch.setattr(start_methods, "_servers", {})
    before = signal.signal(signal.SIGINT, handler)
    try:
        is_ignored = str(handler is signal.SIG_IGN)
        assert run_bare(start, method=method) == [(is_ignored, is_ignored)]
    finally:
        signal.signal(signal.SIGINT, before)
    start_methods._close_servers()


def test_replicas_reach_a_manager_of_the_launching_process(
    run_bare: Callable[..., list[Any]], method: ProcessMethod
) -> None:
    with multiprocessing.get_context("spawn").Manager() as manager:
        shared = manager.dict()
        run_bare(lambda replica, found: found.update({replica.ordinal: True}), shared, size=2, method=method)
        assert dict(shared) == {0: True, 1: True}


def test_lambdas_and_closures_can_be_sent(run_bare: Callable[..., list[Any]]) -> None:
    offset = 40
    assert run_bare(lambda replica, more: replica.ordinal + offset + more, 2, size=2) == [42, 43]


def _fail(replica: Replica) -> None:
    raise ZeroDivisionError("on purpose")


class _Stop(BaseException):
    """Neither an error nor a way that Python ends a program."""


def _raises(error: BaseException) -> Callable[[Replica], None]:
    def raise_it(_: Replica) -> None:
        raise error

    return raise_it


@pytest.mark.parametrize(
    ("end", "words", "code"),
    [
        (SystemExit(0), "called sys.exit(0)*; to end a replica, return from its function", 1),
        (SystemExit(), "called sys.exit()*; to end a replica, return from its function", 1),
        (SystemExit(3), "called sys.exit(3)", 3),
        (SystemExit(pytest.ExitCode.TESTS_FAILED), "called sys.exit(1)", 1),
        (SystemExit("the text"), "called sys.exit('the text')", 1),
        (KeyboardInterrupt(), "raised KeyboardInterrupt", 1),
        (_Stop("enough"), "raised _Stop*: enough", 1),
    ],
    ids=repr,
)
def test_what_would_end_the_launching_program_is_an_error_that_names_the_replica(
    run_bare: Callable[..., list[Any]], end: BaseException, words: str, code: int
) -> None:
    with pytest.raises(ReplicaLostError) as caught:
        run_bare(_raises(end), method="forkserver")
    said, _, rest = words.partition("*")
    line = rf"\S*{Path(__file__).name}:\d+"
    text = str(caught.value)
    assert re.fullmatch(rf"the replica with ordinal 0 {re.escape(said)} at {line}{re.escape(rest)}", text), (
        text
    )
    assert caught.value.exit_code == code
    assert caught.value.__notes__[0].startswith("raised in the replica with ordinal 0 on ")
    assert type(end).__name__ in str(caught.value.__cause__), "its traceback"


def test_a_system_exit_is_an_error_however_the_process_was_made(
    run_bare: Callable[..., list[Any]], method: ProcessMethod
) -> None:
    with pytest.raises(ReplicaLostError, match=r"ordinal 0 called sys\.exit\(7\)"):
        run_bare(lambda _: sys.exit(7), method=method)


def test_a_program_that_ends_while_a_replica_imports_it_is_an_error() -> None:
    with pytest.raises(ReplicaLostError, match=r"^the replica's process called sys\.exit\(0\)"):
        run_processes(_job(_Ending()), [0], [dict(os.environ)])


class _Ending:
    """A function that is loaded as the program of a torch_xla launch is: by importing it."""

    def __call__(self) -> None:
        """Is never reached."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (0,)


def _job(function: Callable[..., Any]) -> Job:
    return Job(function, (), "bare", (0,), dict(os.environ), Setting(None, "default"), main=run_replica)


def test_a_system_exit_of_an_inline_replica_is_an_error_too() -> None:
    with pytest.raises(ReplicaLostError, match=r"ordinal 0 called sys\.exit\(0\)"):
        run_inline(_job(lambda _: sys.exit(0)), 0)


def test_ctrl_c_in_an_inline_replica_stays_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        run_inline(_job(lambda _: signal.raise_signal(signal.SIGINT)), 0)


def test_when_one_fails_the_others_are_ended(
    run_bare: Callable[..., list[Any]], method: ProcessMethod, tmp_path: Path
) -> None:
    def wait_or_fail(replica: Replica) -> None:
        (tmp_path / f"{replica.ordinal}.part").write_text(str(os.getpid()))
        (tmp_path / f"{replica.ordinal}.part").rename(tmp_path / f"{replica.ordinal}.pid")
        if replica.ordinal == 1:
            wait_for_files(tmp_path / "0.pid", tmp_path / "2.pid")
            raise ZeroDivisionError
        time.sleep(WAIT_S)

    with pytest.raises(ZeroDivisionError):
        run_bare(wait_or_fail, size=3, method=method)
    pids = [int((tmp_path / f"{ordinal}.pid").read_text()) for ordinal in range(3)]
    assert not any(is_alive(pid) for pid in pids)


def test_a_process_that_ignores_sigterm_is_killed(
    run_bare: Callable[..., list[Any]], method: ProcessMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ignore_or_fail(replica: Replica) -> None:
        if replica.ordinal == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (tmp_path / "part").write_text(str(os.getpid()))
            (tmp_path / "part").rename(tmp_path / "pid")
            time.sleep(WAIT_S)
        wait_for_files(tmp_path / "pid")
        raise ZeroDivisionError

    sent: list[tuple[int, signal.Signals]] = []
    send = Process.signal

    def recorded(process: Process, number: signal.Signals) -> None:
        sent.append((process.pid, number))
        send(process, number)

    monkeypatch.setattr(Process, "signal", recorded)
    monkeypatch.setattr(processes, "STOP_GRACE_S", 0.1)
    with pytest.raises(ZeroDivisionError):
        run_bare(ignore_or_fail, size=2, method=method)
    pid = int((tmp_path / "pid").read_text())
    # Without the signal, it would end by itself, because its pipe is closed.
    assert (pid, signal.SIGKILL) in sent
    # On a busy machine, it ends after that grace.
    wait_for_end_of([pid])


def test_the_first_process_which_serves_the_others_is_ended_last(
    run_bare: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    send = Process.signal

    def watched(process: Process, number: signal.Signals) -> None:
        ended.append(process.pid)
        send(process, number)

    def wait_or_fail(replica: Replica) -> None:
        (tmp_path / f"{replica.ordinal}.part").write_text(str(os.getpid()))
        (tmp_path / f"{replica.ordinal}.part").rename(tmp_path / f"{replica.ordinal}.pid")
        if replica.ordinal == 2:
            wait_for_files(tmp_path / "0.pid", tmp_path / "1.pid")
            raise ZeroDivisionError
        time.sleep(WAIT_S)

    monkeypatch.setattr(Process, "signal", watched)
    with pytest.raises(ZeroDivisionError):
        run_bare(wait_or_fail, size=3)
    assert ended == [int((tmp_path / f"{ordinal}.pid").read_text()) for ordinal in (2, 1, 0)]


FIX = (
    "Create what cannot be pickled (locks, open files, generators, iterators of loaders) inside "
    "the function, or run one replica with start_method='inline'."
)


def test_a_function_that_does_not_pickle_is_named(run_bare: Callable[..., list[Any]]) -> None:
    lock = threading.Lock()

    def train(_: Replica) -> None:
        lock.acquire()

    with pytest.raises(UsageError) as caught:
        run_bare(train)
    name = f"{test_a_function_that_does_not_pickle_is_named.__name__}.<locals>.train"
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
def test_arguments_that_do_not_pickle_are_named(
    run_bare: Callable[..., list[Any]], args: tuple[Any, ...], culprit: str, reason: str
) -> None:
    with pytest.raises(UsageError) as caught:
        run_bare(_fail, *args)
    assert str(caught.value) == f"{culprit} cannot be sent to another process: {reason} (from launch). {FIX}"


def test_a_place_that_does_not_pickle_is_not_blamed_on_the_function() -> None:
    job = Job(_fail, (), "bare", (0,), {}, Setting(None, "default"), main=run_replica)
    with pytest.raises(UsageError, match="the job cannot be sent to another process: "):
        run_processes(job, [threading.Lock()], [{}])


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [({}, 120.0), ({"POLYXLA_START_TIMEOUT_S": ""}, 120.0), ({"POLYXLA_START_TIMEOUT_S": "0.5"}, 0.5)],
    ids=["default", "empty", "half-a-second"],
)
def test_the_start_timeout(environ: Mapping[str, str], seconds: float) -> None:
    assert env.timeout_s(environ, env.POLYXLA_START_TIMEOUT_S) == seconds


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf"])
def test_an_invalid_start_timeout_is_an_error(run_bare: Callable[..., list[Any]], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        run_bare(_fail, POLYXLA_START_TIMEOUT_S=text)
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
    [result] = run_inline(job, 0)
    assert result.value == (os.getpid(), 0, "yes")
    assert dict(os.environ) == before


def test_functions_and_exceptions_of_a_script_travel_without_a_main_guard(tmp_path: Path) -> None:
    shutil.copy(PROGRAMS / "launching_script.py", tmp_path / "script.py")
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("caught from a replica\n", "", 0)
