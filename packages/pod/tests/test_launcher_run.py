"""`polyxla pod run` over a real OpenSSH server: output, exit codes, and every way in which it can fail."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from polyxla_testing.processes import is_alive, wait_for_end_of, wait_until

if TYPE_CHECKING:
    from conftest import Pod, SshServer

pytestmark = pytest.mark.timeout(120)

# Less than the silence and the wait for a connection after which all would end anyway.
SOON_S = 14.0


def test_output_has_prefixes_and_keeps_its_streams(ssh: Pod) -> None:
    done = ssh.run("one,two", "--", "sh", "-c", "echo to out; echo to err >&2")
    assert done.returncode == 0
    assert ssh.unfolded(done.stdout) == {"w0": ["to out"], "w1": ["to out"]}
    assert ssh.unfolded(done.stderr) == {"w0": ["to err"], "w1": ["to err"]}


def test_all_hosts_of_a_start_have_one_secret_that_no_command_line_shows(ssh: Pod) -> None:
    secrets = []
    for _ in range(2):
        shown = ssh.run(
            "one,two", "--", "sh", "-c", "echo $POLYXLA_SECRET; cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
        )
        by_host = ssh.unfolded(shown.stdout)
        secret = by_host["w0"][0]
        assert len(secret) == 64
        for lines in by_host.values():
            assert lines[0] == secret
            assert secret not in "".join(lines[1:])
        secrets.append(secret)
    assert secrets[0] != secrets[1]
    given = ssh.run("one,two", "--env", "POLYXLA_SECRET=mine", "--", "sh", "-c", "echo $POLYXLA_SECRET")
    assert ssh.unfolded(given.stdout) == {"w0": ["mine"], "w1": ["mine"]}


def test_a_program_that_raises_is_named_and_its_traceback_shown_once(
    ssh: Pod, timed: Callable[[], float]
) -> None:
    done = ssh.run("one,two", *ssh.program("sleeper.py", "1", "raise"))
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "[w1] RuntimeError: boom on 1\n" in done.stderr
    assert "polyxla: error: w1 (two): the command ended with exit code 1\n" in done.stderr
    assert timed() < 20
    wait_for_end_of(ssh.pids(4))


def test_the_exit_code_is_that_of_the_first_failure(ssh: Pod) -> None:
    done = ssh.run("one,two", *ssh.program("sleeper.py", "0", "exit", "7"))
    assert done.returncode == 7
    assert "w0 (one): the command ended with exit code 7" in done.stderr


def test_a_killed_command_is_named_with_its_signal(ssh: Pod) -> None:
    done = ssh.run("one,two", *ssh.program("sleeper.py", "1", "kill"))
    assert done.returncode == 128 + signal.SIGKILL
    assert "w1 (two): the command was ended by SIGKILL" in done.stderr
    wait_for_end_of(ssh.pids(4))


def test_processes_that_ignore_sigterm_or_leave_the_group_are_ended(ssh: Pod) -> None:
    program = ssh.program("sleeper.py", "1", "exit", "3", "stubborn", "daemon")
    begin = time.monotonic()
    done = ssh.run("one,two", *program)
    assert done.returncode == 3
    assert time.monotonic() - begin < SOON_S
    pids = ssh.pids(6)
    assert [pid for pid in pids if is_alive(pid)] == []


def test_a_host_whose_connection_ends_is_named_and_the_others_are_ended(ssh: Pod) -> None:
    process = ssh.start_run("one,two", *ssh.program("sleeper.py"))
    pids = ssh.pids(4)
    (client,) = (pid for pid in children(process.pid) if b"two" in command_of(pid).split(b"\0"))
    begin = time.monotonic()
    os.kill(client, signal.SIGKILL)
    done = ssh.finish(process)
    assert time.monotonic() - begin < SOON_S
    assert done.returncode == 255
    assert "w1 (two): the connection was closed" in done.stderr
    wait_for_end_of(pids)


def test_a_host_that_stops_is_named_by_its_silence(ssh: Pod) -> None:
    process = ssh.start_run("one,two", "--lost-after", "2", *ssh.program("sleeper.py"))
    pids = ssh.pids(4)
    (host,) = {parent_of(pid) for pid in pids if number_of(pid, ssh) == "1"} - set(pids)
    begin = time.monotonic()
    os.kill(host, signal.SIGSTOP)
    try:
        done = ssh.finish(process)
        assert time.monotonic() - begin < SOON_S
    finally:
        os.kill(host, signal.SIGCONT)
    assert done.returncode == 255
    assert "w1 (two): did not answer for 2 s" in done.stderr
    wait_for_end_of(pids)


def number_of(pid: int, pod: Pod) -> str:
    (path,) = pod.directory.glob(f"*-{pid}.pid")
    return path.name.partition("-")[0]


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123  the kernel's file
        return int(file.read().rpartition(")")[2].split()[1])


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123
        return [int(number) for number in file.read().split()]


def command_of(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
        return file.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_the_launcher_ends_all(ssh: Pod, number: signal.Signals) -> None:
    process = ssh.start_run("one,two", *ssh.program("sleeper.py", "last"))
    pids = ssh.pids(4)
    begin = time.monotonic()
    process.send_signal(number)
    done = ssh.finish(process)
    assert set(map(tuple, ssh.unfolded(done.stdout).values())) == {("started", "last words")}
    assert time.monotonic() - begin < SOON_S
    assert done.returncode == 128 + number
    assert "Traceback" not in done.stderr
    wait_for_end_of(pids)


def test_a_signal_does_not_wait_for_a_host_that_never_answers(ssh: Pod, server: SshServer) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        silent.settimeout(30)
        server.add_host("mute", silent.getsockname()[1])
        process = ssh.start_run("one,mute", "--", "true")
        with closing(silent.accept()[0]):
            begin = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert ssh.finish(process).returncode == 128 + signal.SIGINT
    assert time.monotonic() - begin < SOON_S


def test_all_hosts_end_the_command_if_the_launcher_is_killed(ssh: Pod) -> None:
    process = ssh.start_run("one,two", *ssh.program("sleeper.py"))
    pids = ssh.pids(4)
    begin = time.monotonic()
    process.kill()
    wait_for_end_of(pids)
    assert time.monotonic() - begin < SOON_S


def test_the_command_ends_if_what_runs_on_the_host_is_killed(ssh: Pod) -> None:
    process = ssh.start_run("one", *ssh.program("sleeper.py"))
    pids = ssh.pids(2)
    (main,) = (pid for pid in pids if parent_of(pid) not in pids)
    os.kill(parent_of(main), signal.SIGKILL)
    done = ssh.finish(process)
    assert done.returncode == 255
    wait_until(lambda: not is_alive(main), "the command's end")
    # Nothing is left that could end the command's own child.
    for pid in set(pids) - {main}:
        os.kill(pid, signal.SIGKILL)


def test_a_host_that_never_answers_is_named(ssh: Pod, server: SshServer) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        server.add_host("silent", silent.getsockname()[1])
        begin = time.monotonic()
        done = ssh.run("one,silent", "--connect-timeout", "3", "--", "true")
    assert time.monotonic() - begin < SOON_S
    assert done.returncode == 255
    assert "w1 (silent): did not answer within 3 s. This must work without a question: ssh -F" in done.stderr


def test_a_host_that_refuses_is_named_with_what_ssh_says(ssh: Pod, server: SshServer) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as gone:
        server.add_host("gone", gone.getsockname()[1])
    done = ssh.run("gone,one", "--", "true")
    assert done.returncode == 255
    assert "w0 (gone): could not be reached: ssh ended with exit code 255: ssh: connect to" in done.stderr


def test_a_host_without_polyxla_says_how_to_install_it(ssh: Pod) -> None:
    bare = ssh.directory / "bare"
    # Without site-packages.
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    for python, why in ((str(bare), "No module named"), ("/no/python", "exit code 127")):
        done = ssh.run("one", "--python", python, "--", "true")
        assert done.returncode == 255
        assert why in done.stderr
        assert f"Install polyxla-pod there for {python}, or name another Python: --python" in done.stderr


def test_a_command_that_does_not_exist_is_named(ssh: Pod) -> None:
    done = ssh.run("one,two", "--", "no-such-command")
    assert done.returncode == 127
    assert re.search(r"w\d \((one|two)\): start: FileNotFoundError.*'no-such-command'", done.stderr)


def test_a_retry_starts_all_hosts_again(ssh: Pod) -> None:
    mark = ssh.directory / "mark"
    script = f"if mkdir {mark}$NUMBER; then exit 9; fi; echo again"
    done = ssh.run("one,two", "--retry", "2", "--env", "NUMBER={host}", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert [lines[-1] for lines in ssh.unfolded(done.stdout).values()] == ["again", "again"]
    assert "starting again in 1 s, retry 1 of 2" in done.stderr


def test_the_attempts_before_a_signal_are_counted(ssh: Pod) -> None:
    script = f"mkdir {ssh.directory}/mark && exit 9; echo $$ > {ssh.directory}/0.new; cd {ssh.directory}; "
    script += "mv 0.new 0.pid; exec sleep 300"
    process = ssh.start_run("one", "--retry", "1", "--json", "--", "sh", "-c", script)
    ssh.pids(1)
    process.send_signal(signal.SIGINT)
    done = ssh.finish(process)
    assert done.returncode == 128 + signal.SIGINT
    assert json.loads(done.stdout)["attempts"] == 2


def test_a_usage_error_is_not_retried(ssh: Pod) -> None:
    done = ssh.run("one", "--retry", "2", "--", "sh", "-c", "exit 2")
    assert done.returncode == 2
    assert "retry" not in done.stderr


def test_a_directory_is_copied_to_all_hosts_and_the_command_runs_there(ssh: Pod) -> None:
    source = ssh.directory / "project"
    (source / "data").mkdir(parents=True)
    (source / "main.py").write_text("print(len(open('data/text').read()))")
    (source / "data" / "text").write_text("x" * 500_000)
    target = ssh.directory / "copy"
    done = ssh.run("one,two", "--sync", str(source), "--directory", str(target), "--", "python", "main.py")
    assert done.returncode == 0, done.stderr
    assert ssh.unfolded(done.stdout) == {"w0": ["500000"], "w1": ["500000"]}
    assert (target / "data" / "text").stat().st_size == 500_000


def test_a_directory_that_cannot_be_copied_to_a_host_is_named(ssh: Pod) -> None:
    source = ssh.directory / "project"
    source.mkdir()
    (source / "file").write_text("text")
    done = ssh.run("one,two", "--sync", str(source), "--directory", str(source / "file" / "no"), "--", "true")
    assert done.returncode == 255
    assert re.search(r"error: w\d \((one|two)\): archive: NotADirectoryError: .*/file/no", done.stderr)


def test_a_failing_preflight_starts_nothing(ssh: Pod) -> None:
    done = ssh.run("one,two", "--env", "POLYXLA_EMULATE=v4-8", *ssh.program("sleeper.py"))
    assert done.returncode == 2
    assert "polyxla: error: w1 (two): " in done.stderr
    assert list(ssh.directory.glob("*.pid")) == []
    assert "it ends the command" not in done.stderr
