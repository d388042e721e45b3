"""What a process does at its end: the same in a fork of a prepared process as in a Python of its own."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
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
from polyxla.launcher import processes
from polyxla_testing.processes import wait_until

PAUSE_S = 0.3


class Deleted:
    """Writes a file when it is deleted."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __del__(self) -> None:
        self._path.write_text("deleted")


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_what_a_replica_has_left_open_is_written(
    method: ProcessMethod, run_bare: Callable[..., list[Any]], tmp_path: Path
) -> None:
    def leave(_: Replica) -> None:
        program: Any = sys.modules["__main__"]
        # In `__main__`, and in a module that was imported before the fork.
        places: list[Any] = [program, json]
        for place in places:
            place.left = (tmp_path / f"in {place.__name__}").open("w")
            place.left.write("written")
        program.deleted = Deleted(tmp_path / "object")

        def work() -> None:
            time.sleep(PAUSE_S)
            (tmp_path / "thread").write_text(str(time.monotonic()))

        threading.Thread(target=work).start()
        atexit.register(lambda: (tmp_path / "hook").write_text(str(time.monotonic())))

    run_bare(leave, method=method)
    found = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    assert float(found.pop("thread")) <= float(found.pop("hook"))
    assert found == {"in __main__": "written", "in json": "written", "object": "deleted"}


def test_a_replica_that_has_returned_is_awaited_while_its_thread_writes(
    method: ProcessMethod, run_bare: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = tmp_path / "errors"

    def leave_a_thread(_: Replica) -> str:
        def save() -> None:
            wait_until(lambda: "waiting for" in errors.read_text(), "the notice")
            (tmp_path / "checkpoint").write_text("complete")

        threading.Thread(target=save).start()
        return "returned"

    monkeypatch.setattr(processes, "STOP_GRACE_S", PAUSE_S)
    monkeypatch.setattr(processes, "EXIT_NOTICE_S", 2 * PAUSE_S)
    with errors.open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        assert run_bare(leave_a_thread, size=2, method=method) == ["returned"] * 2
    assert (tmp_path / "checkpoint").read_text() == "complete"
    who = [rf"process {number} \(replica {number}; pid \d+\)" for number in range(2)]
    assert re.match(
        rf"polyxla: waiting for the end of {', '.join(who)}: the function has", errors.read_text()
    )


@pytest.mark.parametrize(
    ("function", "how"), [(os.abort, "was ended by SIGABRT"), (lambda: os._exit(9), "exited with code 9")]
)
def test_a_replica_that_fails_after_it_has_returned_is_named(
    function: Callable[[], None], how: str, method: ProcessMethod, run_bare: Callable[..., list[Any]]
) -> None:
    def leave(replica: Replica) -> None:
        if replica.ordinal == 1:
            atexit.register(function)

    with pytest.raises(ReplicaLostError) as caught:
        run_bare(leave, size=2, method=method)
    assert re.fullmatch(rf"process 1 \(replica 1; pid \d+\) returned, then {how}", str(caught.value))


def _reap_all(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.mark.parametrize("handler", [signal.SIG_IGN, _reap_all], ids=["ignored", "reaping"])
def test_a_program_may_ignore_sigchld_or_reap_all_children(
    handler: Any, method: ProcessMethod, run_bare: Callable[..., list[Any]]
) -> None:
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        assert run_bare(lambda replica: replica.ordinal, size=2, method=method) == [0, 1]
        how = "exited with code 9" if method == "forkserver" else "ended with an unknown exit code"
        with pytest.raises(ReplicaLostError, match=how):
            run_bare(lambda _: os._exit(9), method=method)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_output_that_cannot_be_written_is_an_error(
    method: ProcessMethod, run_bare: Callable[..., list[Any]]
) -> None:
    def write(_: Replica) -> None:
        sys.stdout = Path("/dev/full").open("w")  # noqa: SIM115
        print("lost")

    with pytest.raises(ReplicaLostError, match=r"process could not write its output: .*No space left"):
        run_bare(write, method=method)


def test_a_replica_may_close_its_output(method: ProcessMethod, run_bare: Callable[..., list[Any]]) -> None:
    def close(replica: Replica) -> int:
        if replica.ordinal == 0:
            sys.stdout.close()
        else:
            sys.stdout = sys.stderr = None
        return replica.ordinal

    assert run_bare(close, size=2, method=method) == [0, 1]


def end(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    program = f"from polyxla.launcher.child import end_process as end\n{code}\nend(3)"
    # Whose output would not wait for the end.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=environ, text=True, stderr=subprocess.PIPE, timeout=60, check=False, **options
    )


def test_the_exit_code_says_that_output_was_lost() -> None:
    assert end("").returncode == 3
    with Path("/dev/full").open("w") as full:
        assert end("print('text')", stdout=full).returncode == 120


def test_an_exit_hook_that_fails_is_reported_and_the_others_run(tmp_path: Path) -> None:
    hooks = f"""
import atexit, pathlib
atexit.register(pathlib.Path({str(tmp_path / "hook")!r}).touch)
atexit.register(lambda: 1 / 0)"""
    ended = end(hooks)
    assert ended.returncode == 3
    assert "ZeroDivisionError" in ended.stderr
    assert (tmp_path / "hook").exists()
