"""The host's end of a connection, driven by pipes."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polyxla_pod.host.processes import CommandGroup
from polyxla_pod.messages import decode
from polyxla_testing.processes import is_alive, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from conftest import PipedHost

    OpenHost = Callable[..., AbstractContextManager[PipedHost]]

TIMEOUT_S = 30.0
PRINT_PID = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"


def sleeping(host: PipedHost) -> int:
    host.start(sys.executable, "-c", PRINT_PID)
    return int(host.receive("line").content["text"])


def test_it_answers_heartbeats_with_its_time(host: PipedHost) -> None:
    host.send("beat", number=7)
    answer = host.receive("beat").content
    assert answer["number"] == 7
    assert abs(answer["time"] - time.time()) < 5


def test_lines_have_host_stream_and_time(host: PipedHost) -> None:
    host.send("job", host=3, lost_after_s=10, grace_s=1)
    host.start("sh", "-c", "echo out; echo 'bar 1%\rbar 2%\r' >&2; printf end")
    messages = [host.receive("line").content for _ in range(3)]
    assert {(message["host"], message["stream"], message["text"]) for message in messages} == {
        (3, "out", "out"),
        (3, "err", "bar 2%"),
        (3, "out", "end"),
    }
    assert all(abs(message["time"] - time.time()) < 20 for message in messages)
    assert host.receive("exit").content == {"code": 0}
    host.receive("end")
    assert host.process.wait(TIMEOUT_S) == 0


def test_the_output_before_an_exit_arrives_before_it(host: PipedHost) -> None:
    host.start(
        sys.executable, "-c", "print('x' * 100 + '\\n' * 1, end='') or [print(n) for n in range(5000)]"
    )
    assert host.process.stdout
    kinds = []
    while (message := decode(host.process.stdout.readline())) and message.kind != "exit":
        kinds.append(message.kind)
    assert kinds == ["line"] * 5001


def test_much_output_waits_for_a_slow_reader_and_is_complete(host: PipedHost) -> None:
    host.start(sys.executable, "-c", "for n in range(20000): print('x' * 50)")
    time.sleep(1)
    used = Path(f"/proc/{host.process.pid}/status").read_text()
    peak_kb = int(used.partition("VmHWM:")[2].split()[0])
    assert peak_kb < 100_000
    assert host.lines() == ["x" * 50] * 20000


def test_a_long_line_is_sent_in_parts_of_the_same_size(host: PipedHost) -> None:
    host.start(sys.executable, "-c", "print('x' * 150_000); print('end')")
    assert [len(text) for text in host.lines()] == [65536, 65536, 150_000 - 2 * 65536, 3]


def test_the_command_has_the_pythons_directory_in_front_of_its_path(host: PipedHost) -> None:
    host.start("sh", "-c", "command -v python; echo $A", A="1")
    assert host.lines() == [str(Path(sys.executable).parent / "python"), "1"]


def test_it_ends_the_command_when_its_input_closes(host: PipedHost) -> None:
    pid = sleeping(host)
    assert host.process.stdin
    host.process.stdin.close()
    host.process.wait(TIMEOUT_S)
    assert not is_alive(pid)


def test_it_ends_the_command_when_heartbeats_stop(host: PipedHost) -> None:
    host.send("job", host=0, lost_after_s=1, grace_s=1)
    pid = sleeping(host)
    for number in range(8):
        host.send("beat", number=number)
        time.sleep(0.25)
    assert is_alive(pid)
    begin = time.monotonic()
    host.process.wait(TIMEOUT_S)
    assert not is_alive(pid)
    assert time.monotonic() - begin < TIMEOUT_S / 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_it_ends_the_command_when_it_is_ended(host: PipedHost, number: signal.Signals) -> None:
    pid = sleeping(host)
    host.process.send_signal(number)
    assert host.receive("exit").content == {"code": -signal.SIGTERM}
    host.process.wait(TIMEOUT_S)
    assert not is_alive(pid)


def test_the_command_ends_with_it_even_if_it_is_killed(host: PipedHost) -> None:
    pid = sleeping(host)
    host.process.kill()
    wait_until(lambda: not is_alive(pid), "the command's end", TIMEOUT_S)


def test_a_process_of_another_user_does_not_protect_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = []

    def kill(pid: int, number: int) -> None:
        reached.append(pid)
        raise PermissionError

    group = CommandGroup(["sleep", "30"], os.environ, None)
    # The block closes the command's pipes.
    with group._process, monkeypatch.context() as patches:
        patches.setattr(group, "_orphans", lambda: [2, 3])
        patches.setattr(os, "kill", kill)
        group.signal(signal.SIGTERM)
        assert reached == [2, 3]
        wait_until(lambda: group.poll() == -signal.SIGTERM, "the command's end", TIMEOUT_S)


def test_it_ends_when_nothing_was_started(host: PipedHost) -> None:
    host.send("stop")
    assert host.process.wait(TIMEOUT_S) == 0


def test_what_it_cannot_do_is_answered(host: PipedHost) -> None:
    host.start("no-such-command")
    error = host.receive("error").content
    assert error["code"] == 127
    assert "no-such-command" in error["text"]
    host.send("dance")
    assert "KeyError" in host.receive("error").content["text"]
    host.send("archive", directory="/proc/no", data="", last=True)
    assert "archive: " in host.receive("error").content["text"]


def test_prints_of_libraries_do_not_mix_with_messages() -> None:
    code = "import sys, polyxla_pod.host.__main__ as m; real = m.HostSession.run; \
m.HostSession.run = lambda self: (print('noise', flush=True), real(self)); m.main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=b"",
        capture_output=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    assert done.stderr == b"noise\n"
    message = decode(done.stdout)
    assert message is not None
    assert message.kind == "hello"
    assert message.content["pid"] != os.getpid()


def send_archive(host: PipedHost, directory: Path, size: int) -> None:
    for last in (False, True):
        data = base64.b64encode(os.urandom(size)).decode()
        host.send("archive", directory=str(directory), data=data, last=last)


@pytest.mark.parametrize("does", ["sleep 300", "yes >&2"])
def test_it_answers_while_tar_takes_nothing(open_hosts: OpenHost, tmp_path: Path, does: str) -> None:
    (tmp_path / "tar").write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; {does}\n"
    )
    (tmp_path / "tar").chmod(0o755)
    with open_hosts(PATH=f"{tmp_path}:{os.environ['PATH']}") as host:
        send_archive(host, tmp_path, 1 << 20)
        host.send("beat", number=7)
        assert host.receive("beat").content["number"] == 7
        wait_until((tmp_path / "pid").exists, "tar")
        pid = int((tmp_path / "pid").read_text())
        assert host.process.stdin
        host.process.stdin.close()
        assert host.process.wait(TIMEOUT_S) == 0
    wait_until(lambda: not is_alive(pid), "tar's end", TIMEOUT_S)


def test_it_ends_though_what_the_command_leaves_prints_for_ever(host: PipedHost) -> None:
    host.start("sh", "-c", "setsid yes & sleep 0.2; exit 3")
    assert host.receive("exit").content == {"code": 3}
    host.receive("end")
    assert host.process.wait(TIMEOUT_S) == 0
