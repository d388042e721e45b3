"""The record of jobs that were started on this machine."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polyxla import UsageError
from polyxla_pod.launcher import history
from polyxla_pod.launcher.history import JobLog

if TYPE_CHECKING:
    from conftest import Pod


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


def test_the_newest_jobs_are_kept_over_the_end_of_a_year(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "KEPT", 3)
    ids, form_time = [], time.strftime
    for date in ("26-12-30", "26-12-31", "27-01-01", "27-01-02"):
        then = time.strptime(date, "%y-%m-%d")
        with monkeypatch.context() as patch:
            patch.setattr(time, "strftime", lambda form, then=then: form_time(form, then))
            job = JobLog(directory, {"command": []}, [])
        ids.append(job.id)
        job.close(0, [])
    assert sorted(path.name for path in directory.iterdir()) == ids[1:]


def test_a_job_without_a_place_for_its_log_runs_all_the_same(stand_in: Pod) -> None:
    stand_in.environ["XDG_STATE_HOME"] = "/proc/nowhere"
    done = stand_in.run("one", "--json", "--", "echo", "hello")
    assert (done.returncode, json.loads(done.stdout)["exit_code"]) == (0, 0)
    assert "[w0] hello\n" in done.stderr
    assert "cannot be written (No such file or directory): the job has no log" in done.stderr
    assert "polyxla pod logs" not in done.stderr


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(UsageError, match=r"no home directory.* Set HOME, or XDG_STATE_HOME"):
        history.root({})
    assert history.root({"XDG_STATE_HOME": "/state"}) == Path("/state/polyxla/pod")


def test_a_process_elsewhere_gets_no_signal(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JobLog(directory, {"command": []}, [])
    with monkeypatch.context() as patch:
        # A container has a host name of its own, and another may share its directory.
        patch.setattr("platform.node", lambda: "elsewhere")
        patch.setattr(os, "kill", lambda *_: pytest.fail("a process got a signal"))
        known = history.find(directory, job.id)
        with pytest.raises(
            UsageError, match=f"job {job.id} was started elsewhere: on .*, and this is elsewhere"
        ):
            history.end(directory, known)
    before = signal.signal(signal.SIGTERM, lambda *_: job.close(143, []))
    try:
        assert history.end(directory, known)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert history.find(directory, job.id)["exit_code"] == 143


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_full_disk_under_its_output_does_not_end_the_job(stand_in: Pod, arguments: list[str]) -> None:
    stand_in.prefix = ["sh", "-c", 'exec "$@" > /dev/full', "sh"]
    script = "echo 1; sleep 1; echo 2; sleep 1; echo end > ended"
    done = stand_in.run("one", "--directory", str(stand_in.directory), *arguments, "--", "sh", "-c", script)
    assert (stand_in.directory / "ended").exists()
    assert "cannot be written (No space left on device)" in done.stderr
    assert "Traceback" not in done.stderr
    # A document that nobody can read is a failure of the command.
    assert done.returncode == (1 if arguments else 0)
    stand_in.prefix = []
    lines = stand_in.call("logs").stdout
    assert lines == "[w0] 1\n[w0] 2\n"
