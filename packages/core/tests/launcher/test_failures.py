"""How the death or the stall of a replica is reported."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing.connection
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from polyxla import Replica, ReplicaLostError, StalledError
from polyxla.contracts.job import ProcessMethod
from polyxla.launcher import failures, processes
from polyxla.launcher.child import REPLICA_THREAD
from polyxla.launcher.failures import PARENT_GONE
from polyxla.launcher.launch import run_replica
from polyxla.launcher.messages import Message, Setup
from polyxla.launcher.process_handle import is_ending
from polyxla.launcher.start_methods import spawn
from polyxla.plugin import Job, Setting
from polyxla_testing.processes import (
    WAIT_S,
    is_alive,
    is_in_state,
    wait_for_end_of,
    wait_for_files,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("bare_runtime")

PROGRAMS = Path(__file__).parent.parent / "programs"


def _fail(replica: Replica) -> None:
    raise ZeroDivisionError("on purpose")


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
def test_a_killed_replica_is_named_with_its_signal(
    run_bare: Callable[..., list[Any]],
    method: ProcessMethod,
    end: Callable[[], None],
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Its closed pipe must tell, without looking.
    monkeypatch.setattr(processes, "_check_alive", lambda _: pytest.fail("nobody noticed"))
    monkeypatch.setattr(processes, "LIVENESS_CHECK_S", WAIT_S)

    def die(replica: Replica) -> None:
        if replica.ordinal == 1:
            (tmp_path / "pid").write_text(str(os.getpid()))
            end()
        time.sleep(WAIT_S)

    with pytest.raises(ReplicaLostError) as caught:
        run_bare(die, size=2, method=method)
    pid = (tmp_path / "pid").read_text()
    text = str(caught.value)
    peak = re.search(r"peak was (\d+) MiB", text)
    # A Python needs 5 MiB at least; a figure in the wrong unit would be far off.
    assert peak is None or 5 < int(peak[1]) < 5000
    who = f"process 1 (replica 1; pid {pid})"
    assert text == f"{who} {how.format(peak=peak and peak[1])} before it returned a result"
    assert caught.value.exit_code == 1


def test_a_death_is_named_though_the_error_that_it_caused_arrives_first(
    run_bare: Callable[..., list[Any]], method: ProcessMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die_or_fail(replica: Replica) -> None:
        pid = tmp_path / "pid"
        if replica.ordinal == 1:
            pid.with_suffix(".part").write_text(str(os.getpid()))
            pid.with_suffix(".part").rename(pid)
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_files(pid)
        wait_for_end_of([int(pid.read_text())])
        raise RuntimeError("lost the other replica")

    wait: Any = multiprocessing.connection.wait
    monkeypatch.setattr(multiprocessing.connection, "wait", lambda pipes, *timeout: wait(pipes[:1], *timeout))
    with pytest.raises(ReplicaLostError, match=r"process 1 \(replica 1; pid \d+\) was ended") as caught:
        run_bare(die_or_fail, size=2, method=method)
    assert str(caught.value.__cause__) == "lost the other replica"


def test_a_death_is_named_though_it_takes_a_while(
    run_bare: Callable[..., list[Any]], method: ProcessMethod, tmp_path: Path
) -> None:
    def end_slowly_or_fail(replica: Replica) -> None:
        pid = tmp_path / "pid"
        if replica.ordinal == 1:
            pid.with_suffix(".part").write_text(str(os.getpid()))
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
            pid.with_suffix(".part").rename(pid)
            # Without its main thread, a process is one that exits, as a large one is for long on a busy host.
            ctypes.CDLL(None).pthread_exit(None)
        wait_for_files(pid)
        wait_until(lambda: is_ending(int(pid.read_text())), "the end's beginning")
        raise RuntimeError("lost the other replica")

    with pytest.raises(ReplicaLostError, match=r"process 1 \(replica 1; pid \d+\) was ended by SIGKILL"):
        run_bare(end_slowly_or_fail, size=2, method=method)


def test_a_known_cause_is_reported_in_place_of_the_error_that_it_caused(
    run_bare: Callable[..., list[Any]], method: ProcessMethod
) -> None:
    def lose_the_device(_: Replica) -> None:
        failures.blame(ReplicaLostError("the worker is gone"))
        raise ValueError("a future failed")

    with pytest.raises(ReplicaLostError, match="the worker is gone") as caught:
        run_bare(lose_the_device, method=method)
    assert "ValueError: a future failed" in str(caught.value.__cause__)


def test_a_lost_replica_is_seen_while_a_process_it_forked_lives_on(
    run_bare: Callable[..., list[Any]], method: ProcessMethod, tmp_path: Path
) -> None:
    def fork_and_die(_: Replica) -> None:
        if (pid := os.fork()) == 0:
            time.sleep(10 * WAIT_S)
            os._exit(0)
        (tmp_path / "pid").write_text(str(pid))
        os.kill(os.getpid(), signal.SIGKILL)

    def end_the_forked_one() -> None:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    # Its end closes the pipe, which would make up for a loss that is not seen.
    rescue = threading.Timer(WAIT_S, end_the_forked_one)
    rescue.start()
    try:
        with pytest.raises(ReplicaLostError, match="was ended by SIGKILL"):
            run_bare(fork_and_die, method=method)
        assert rescue.is_alive(), "seen only when the forked process ended"
    finally:
        rescue.cancel()
        rescue.join()
        with contextlib.suppress(ProcessLookupError):
            end_the_forked_one()


def test_a_process_that_never_sends_hello_is_a_lost_replica(
    run_bare: Callable[..., list[Any]], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import time; time.sleep({WAIT_S})")
    with pytest.raises(ReplicaLostError) as caught:
        run_bare(_fail, PYTHONPATH=str(tmp_path), POLYXLA_START_TIMEOUT_S="0.5")
    before, _, after = str(caught.value).partition(" (pid ")
    pid, _, text = after.partition(") ")
    assert before == "process 0"
    assert text == "did not answer within 0.5 s of its start; POLYXLA_START_TIMEOUT_S sets the limit"
    assert not is_alive(int(pid))


def test_a_process_that_cannot_start_is_a_lost_replica(run_bare: Callable[..., list[Any]]) -> None:
    with pytest.raises(ReplicaLostError, match=r"process 0 \(pid \d+\) exited with code 1 before"):
        run_bare(_fail, PYTHONHOME="/nonexistent")


def test_a_child_whose_parent_closes_the_pipe_leaves_with_its_own_code() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = spawn(theirs, os.environ)
    theirs.close()
    assert ours.recv() == Message("hello")
    job = Job(lambda _: time.sleep(WAIT_S), (), "bare", (0,), {}, Setting(None, "default"), main=run_replica)
    ours.send(Setup(dict(os.environ), sys.argv, sys.path, ".", b"", cloudpickle.dumps((Job.run, job, 0))))
    ours.close()
    end = process.wait(time.monotonic() + WAIT_S)
    assert end is not None
    assert end.code == PARENT_GONE


def test_a_failed_process_ends_at_once_if_others_of_its_replicas_are_threads(tmp_path: Path) -> None:
    def fail(_: Replica) -> None:
        atexit.register((tmp_path / "hook").touch)
        # Stands for a replica that waits for this one in a collective.
        threading.Thread(target=time.sleep, args=(WAIT_S,), name=f"{REPLICA_THREAD}-1", daemon=True).start()
        raise ZeroDivisionError

    ours, theirs = multiprocessing.Pipe()
    process = spawn(theirs, os.environ)
    theirs.close()
    job = Job(fail, (), "bare", (0, 1), {}, Setting(None, "default"), main=run_replica)
    ours.send(Setup(dict(os.environ), sys.argv, sys.path, ".", b"", cloudpickle.dumps((Job.run, job, 0))))
    kinds = [ours.recv().kind for _ in range(3)]
    end = process.wait(time.monotonic() + WAIT_S)
    ours.close()
    assert kinds == ["hello", "replica", "answer"]
    assert end is not None
    assert end.code == 1
    assert not (tmp_path / "hook").exists()


def test_replica_processes_end_with_a_killed_launching_process(tmp_path: Path) -> None:
    shutil.copy(PROGRAMS / "two_sleepers.py", tmp_path / "script.py")
    parent = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, env={**os.environ, "FOLDER": str(tmp_path)}
    )
    files = [tmp_path / "0.pid", tmp_path / "1.pid"]
    try:
        wait_for_files(*files)
    finally:
        parent.kill()
        parent.wait(WAIT_S)
    pids = [int(file.read_text()) for file in files]
    try:
        wait_for_end_of(pids)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_stalled_replicas_are_reported_and_ended(
    run_bare: Callable[..., list[Any]],
    method: ProcessMethod,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dawdle(replica: Replica) -> None:
        (tmp_path / f"{replica.ordinal}.part").write_text(str(os.getpid()))
        (tmp_path / f"{replica.ordinal}.part").rename(tmp_path / f"{replica.ordinal}.pid")
        if replica.ordinal == 1:
            wait_for_files(tmp_path / "0.pid", tmp_path / "2.pid")
            wait_until(lambda: is_in_state("T", int((tmp_path / "2.pid").read_text())), "a stopped process")
            failures.report_stall("all-reduce of step, for 3 s\nand more")
        if replica.ordinal == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(WAIT_S)

    monkeypatch.setattr(failures, "POSITION_WAIT_S", 2.0)
    with pytest.raises(StalledError) as caught:
        run_bare(dawdle, size=3, method=method)
    text = str(caught.value)
    assert "waited too long for other replicas: all-reduce of step, for 3 s; the position of each" in text
    stopped = (tmp_path / "2.pid").read_text()
    assert (
        f"process 2 (replica 2; pid {stopped}) was stopped, by a signal or a debugger (kill -CONT {stopped} "
        in text
    )
    shown = capfd.readouterr().err
    assert "process 1 (replica 1; pid" in shown.split("stalls:\nall-reduce of step, for 3 s\nand more", 1)[0]
    position = shown.partition("polyxla: process 0 (replica 0; pid")[2].partition("polyxla: process 2")[0]
    assert "thread MainThread:" in position
    assert "in dawdle" in position
    assert "did not report its position within 2 s: its Python does not run" in shown


def test_replicas_that_wait_for_one_that_has_returned_are_named_with_step_and_line(
    run_bare: Callable[..., list[Any]],
    method: ProcessMethod,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def train(replica: Replica) -> None:
        replica.steps = 3
        (tmp_path / f"{replica.ordinal}.part").write_text(str(os.getpid()))
        (tmp_path / f"{replica.ordinal}.part").rename(tmp_path / f"{replica.ordinal}")
        if replica.ordinal == 0:
            return
        replica.steps = 5
        if replica.ordinal == 1:
            wait_for_files(tmp_path / "0", tmp_path / "2")
            wait_for_end_of([int((tmp_path / "0").read_text())])
            failures.report_stall("all-reduce of step, for 6 s")
        time.sleep(WAIT_S)

    with pytest.raises(StalledError) as caught:
        run_bare(train, size=3, method=method)
    line = train.__code__.co_firstlineno
    where = re.escape(f"{Path(__file__).name}:")
    assert re.fullmatch(
        rf"replica 0 returned after 3 steps; replica 1 waits in step 4 at .*{where}{line + 10}; "
        rf"replica 2 is in step 4 at .*{where}{line + 11}. {re.escape(failures.UNEQUAL)}",
        str(caught.value),
    ), str(caught.value)
    # The one sentence is all that there is to say.
    assert "all-reduce of step" not in capfd.readouterr().err


def test_a_replica_that_has_returned_on_another_host_is_named_by_the_report(
    run_bare: Callable[..., list[Any]], method: ProcessMethod
) -> None:
    def train(replica: Replica) -> None:
        if replica.ordinal == 1:
            failures.report_stall("all-reduce of step, for 6 s", [7, 9])
        time.sleep(WAIT_S)

    with pytest.raises(StalledError, match=r"^replicas 7, 9 returned; .*replica 1 waits .*at "):
        run_bare(train, size=2, method=method)


def _living(session: int) -> list[str]:
    command = ["ps", "--no-headers", "-o", "stat,pid,args", "-s", str(session)]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return [line for line in lines if not line.startswith("Z")]


def _interrupt_at(tmp_path: Path, program: str, moment: str) -> tuple[int, str, list[str]]:
    """Interrupt a program's group once a file exists; return its code, its output and what is left."""
    shutil.copy(PROGRAMS / program, tmp_path / "script.py")
    environ = {**os.environ, "FOLDER": str(tmp_path), "MOMENT": moment}
    command = [sys.executable, "-m", "polyxla.cli.script", "script.py"]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environ, stdout=out, stderr=out, start_new_session=True
        )
    try:
        wait_for_files(tmp_path / moment)
        os.killpg(process.pid, signal.SIGINT)
        code = process.wait(WAIT_S)
        left = _living(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return code, (tmp_path / "out").read_text(), left


@pytest.mark.parametrize("moment", ["server-imports", "program-imports", "replicas-run", "replicas-exit"])
def test_ctrl_c_is_one_line_and_leaves_no_process(tmp_path: Path, moment: str) -> None:
    code, text, left = _interrupt_at(tmp_path, "interrupted.py", moment)
    assert (code, text, left) == (130, "polyxla: interrupted\n", [])
    ended = sorted(path.name for path in tmp_path.glob("*-has-ended"))
    assert ended == (["0-has-ended", "1-has-ended"] if moment == "replicas-run" else [])
