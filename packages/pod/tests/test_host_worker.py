"""A worker beside the command: its token, and when it ends. Any program can be the worker of these tests."""

from __future__ import annotations

import os
import signal
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polyxla_pod.messages import decode
from polyxla_testing.processes import is_alive, wait_until

if TYPE_CHECKING:
    from conftest import PipedHost

TOKEN = "a secret of 16 characters"
WORKER = """
import os, sys, time
print(os.getpid(), sys.argv[1], open(sys.argv[1]).read(), flush=True)
print("ready now", file=sys.stderr, flush=True)
time.sleep(300)
"""
READ_TOKEN = "import os; print(open(os.environ['POLYXLA_XRT_TOKEN_FILE']).read())"


def start_worker(host: PipedHost, program: str = WORKER) -> tuple[int, Path]:
    """Start a worker; return its process id and its file with the token, once it is ready."""
    command = [sys.executable, "-c", program, "{token_file}"]
    host.send("worker", command=command, environ={}, token=TOKEN, ready="ready")
    line = host.receive("line").content
    assert line["stream"] == "worker"
    pid, file, token = line["text"].split(" ", 2)
    assert token == TOKEN
    host.receive("ready")
    return int(pid), Path(file)


def test_the_command_gets_the_token_by_a_file_that_only_its_user_can_open(host: PipedHost) -> None:
    pid, file = start_worker(host)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    command_line = Path(f"/proc/{pid}/cmdline").read_bytes()
    assert str(file).encode() in command_line
    assert TOKEN.encode() not in command_line
    host.start(sys.executable, "-c", READ_TOKEN)
    assert host.receive("line").content["text"] == TOKEN
    host.receive("exit")
    host.send("stop")
    host.receive("end")
    host.process.wait(30)
    assert not file.exists()


def test_a_worker_outlives_the_command_until_the_launcher_stops_the_host(host: PipedHost) -> None:
    pid, _ = start_worker(host)
    host.start("true")
    assert host.receive("exit").content == {"code": 0}
    for number in range(3):
        host.send("beat", number=number)
        host.receive("beat")
    assert is_alive(pid)
    host.send("stop")
    host.receive("end")
    assert not is_alive(pid)


def test_a_worker_that_ends_is_reported_before_the_command_that_needs_it(host: PipedHost) -> None:
    pid, _ = start_worker(host)
    host.start("sh", "-c", f"while kill -0 {pid} 2>/dev/null; do sleep 0.01; done; sleep 0.3; exit 1")
    os.kill(pid, signal.SIGKILL)
    assert host.receive("worker_exit").content == {"code": -signal.SIGKILL}
    assert host.receive("exit").content == {"code": 1}
    host.send("stop")
    host.receive("end")


def test_a_worker_that_cannot_start_is_answered(host: PipedHost) -> None:
    host.send("worker", command=["no-such-worker"], environ={}, token=TOKEN, ready="ready")
    error = host.receive("error").content
    assert error["code"] == 127
    assert "no-such-worker" in error["text"]


def test_a_worker_that_ignores_sigterm_is_killed(host: PipedHost) -> None:
    pid, _ = start_worker(host, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + WORKER)
    host.start("true")
    host.send("stop")
    host.receive("end")
    assert not is_alive(pid)


@pytest.mark.parametrize("has_started", [False, True])
def test_a_worker_ends_when_the_input_closes(host: PipedHost, has_started: bool) -> None:
    pid, _ = start_worker(host)
    if has_started:
        host.start("sleep", "300")
    assert host.process.stdin
    host.process.stdin.close()
    host.process.wait(30)
    assert not is_alive(pid)


def test_a_worker_and_its_token_end_with_the_hosts_process_even_if_it_is_killed(host: PipedHost) -> None:
    pid, file = start_worker(host)
    host.process.kill()
    host.process.wait(30)
    wait_until(lambda: not is_alive(pid), "the worker's end")
    assert not file.exists()


def test_a_workers_last_lines_come_before_its_exit(host: PipedHost) -> None:
    command = [sys.executable, "-c", "print('last words'); raise SystemExit(3)"]
    host.send("worker", command=command, environ={}, token=TOKEN, ready="ready")
    assert host.process.stdout
    messages = [decode(host.process.stdout.readline()) for _ in range(2)]
    assert [message.kind for message in messages if message] == ["line", "worker_exit"]
