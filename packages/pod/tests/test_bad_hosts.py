"""Hosts that send what they should not: each is named, in time, and the launcher ends all the same."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polyxla_testing.processes import wait_for_end_of

if TYPE_CHECKING:
    from conftest import Pod

pytestmark = pytest.mark.timeout(120)
HELLO = """echo '{"polyxla_pod":"hello"}'\n"""


def said(kind: str, **content: object) -> str:
    return f"echo '{json.dumps({'polyxla_pod': kind, **content}, separators=(',', ':'))}'\n"


def write_stand_in(pod: Pod, script: str) -> None:
    """Have the host do this in place of its session."""
    (pod.directory / "bin" / "ssh").write_text(writes_pid(pod.directory / "0.pid") + script)


def writes_pid(path: Path) -> str:
    return f"#!/bin/sh\necho $$ > {path}.new; mv {path}.new {path}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (
            "head -c 5000000 /dev/zero | tr '\\0' x; exec sleep 300\n",
            "sent more than 1 MiB without the end of a line",
        ),
        ("exec sleep 300\n", "did not answer for 4 s: its link is cut"),
        ("yes | tr -d '\\n'\n", "sent more than 1 MiB without the end of a line"),
        ("yes\n", "did not answer for 4 s"),
        (
            "sleep 300 & echo $! > ${0%/*}/../1.pid; exit 3\n",
            "the connection was closed: ssh ended with exit code 3",
        ),
        (said("line", stream="out") + "exec sleep 300\n", "sent a message 'line' with other content"),
        (
            said("line", stream="out", text=[1]) + "exec sleep 300\n",
            "sent a message 'line' with other content",
        ),
        (said("exit", code="0") + "exec sleep 300\n", "sent a message 'exit' with other content"),
        (said("exit", code=10**30) + "exec sleep 300\n", "sent a message 'exit' with other content"),
        (said("error", text={}, code=None) + "exec sleep 300\n", "sent a message 'error' with other content"),
        (
            said("beat", number=0, time=float("nan")) + "exec sleep 300\n",
            "sent a message 'beat' with other content",
        ),
        (said("beat", number=[0], time=1) + "exec sleep 300\n", "sent a message 'beat' with other content"),
        (said("dance") + "exec sleep 300\n", "sent an unknown message 'dance'"),
        (
            "printf '{\"polyxla_pod\":'; yes '[' | head -99999 | tr -d '\\n'; echo; exit 4\n",
            "ended with exit code 4",
        ),
        (said("exit", code=-40) + said("end"), "the command was ended by signal 40"),
    ],
)
def test_it_is_named(stand_in: Pod, script: str, problem: str) -> None:
    write_stand_in(stand_in, HELLO + script)
    done = stand_in.run("one", "--no-preflight", "--lost-after", "4", "--", "true")
    for path in stand_in.directory.glob("1.pid"):
        os.kill(int(path.read_text()), signal.SIGKILL)
    assert problem in done.stderr
    assert "error: w0 (one): " in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == (128 + 40 if "40" in problem else 255)
    wait_for_end_of(stand_in.pids(1))


@pytest.mark.parametrize("facts", [{}, [], {"versions": 3}, None])
def test_facts_of_other_types_are_named(stand_in: Pod, facts: object) -> None:
    write_stand_in(stand_in, HELLO + said("facts", facts=facts) + "exec sleep 300\n")
    done = stand_in.run("one", "--lost-after", "4", "--", "true")
    assert "error: w0 (one): sent a message 'facts' with other content" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_number_of_any_length_is_a_line_like_others(stand_in: Pod) -> None:
    done = stand_in.run(
        "one", "--no-preflight", "--", "sh", "-c", "echo step $(yes 9 | head -6000 | tr -d '\\n')"
    )
    assert done.returncode == 0, done.stderr
    assert "step 999" in done.stdout


def test_the_reason_of_a_full_disk_is_named_and_nothing_is_left(stand_in: Pod, tmp_path: Path) -> None:
    # Says as much as tar does when it can write none of a thousand files, and then waits for its input's end.
    tar = stand_in.directory / "bin" / "tar"
    tar.write_text(
        writes_pid(stand_in.directory / "1.pid")
        + "yes 'tar: a: Cannot write: No space left on device' | head -20000 >&2\ncat > /dev/null; exit 2\n"
    )
    tar.chmod(0o755)
    source = tmp_path / "project"
    source.mkdir()
    (source / "file").write_bytes(bytes(range(256)) * 4000)
    done = stand_in.run(
        "one", "--no-preflight", "--sync", str(source), "--directory", str(tmp_path / "copy"), "--", "true"
    )
    assert done.returncode == 255
    problem = "archive: OSError: tar could not unpack it: tar: a: Cannot write: No space left on device"
    assert f"error: w0 (one): {problem}\n" in done.stderr
    wait_for_end_of(stand_in.pids(1))


def test_a_job_outlives_its_record(stand_in: Pod) -> None:
    state = stand_in.directory / "state" / "polyxla" / "pod"
    script = f"sleep 1; rm -r {state}/*; mkdir -p {state}; sleep 2; echo done"
    done = stand_in.run("one", "--no-preflight", "--", "sh", "-c", script)
    assert (done.returncode, done.stdout) == (0, "[w0] done\n"), done.stderr
    assert done.stderr.count("cannot be written (No such file or directory)") == 1
