"""Signals reach a program in a fork of a warm process, and it never outlives its client."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polyxla_testing.processes import is_in_state, wait_for_end_of, wait_until

if TYPE_CHECKING:
    from conftest import Machine

PROGRAMS = Path(__file__).parent / "programs"


def start(machine: Machine) -> tuple[subprocess.Popen[str], int]:
    """Start a program that waits; return its client and its process id."""
    client = machine.start("run", PROGRAMS / "waits.py")
    assert client.stdout
    return client, int(client.stdout.readline())


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long), signal.SIGKILL]
)
def test_a_program_ends_with_its_client(warm: Machine, number: signal.Signals) -> None:
    client, pid = start(warm)
    assert pid != client.pid
    client.send_signal(number)
    assert client.wait(60) == -number
    wait_for_end_of([pid])


def test_a_program_handles_a_signal_that_its_client_receives(warm: Machine) -> None:
    client, pid = start(warm)
    client.send_signal(signal.SIGINT)
    assert client.stdout
    assert client.stdout.read() == "interrupted\n"
    assert client.wait(60) == 7
    wait_for_end_of([pid])


def test_a_terminal_interrupts_and_stops_a_program(warm: Machine) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(warm.command[0], [*warm.command, "run", str(PROGRAMS / "waits.py")], warm.environ)
    program = int(_line(terminal))
    os.write(terminal, b"\x1a")
    os.waitpid(pid, os.WUNTRACED)
    wait_until(lambda: is_in_state("T", program), "the program is stopped")
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not is_in_state("T", program), "the program continues")
    os.write(terminal, b"\x03")
    # With the terminal's echo of both keys.
    assert _line(terminal) == "^Z^Cinterrupted\r\n"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    os.close(terminal)
    wait_for_end_of([program])
    assert warm.served() == 1


@pytest.mark.slow
def test_programs_end_when_the_warm_process_is_killed(machine: Machine) -> None:
    server = machine.prepare()
    client, pid = start(machine)
    os.kill(server, signal.SIGKILL)
    assert client.wait(60) == 1
    wait_for_end_of([pid])
    # Nothing answers at its socket any more.
    assert machine.run("run", PROGRAMS / "ends.py", "exit").returncode == 3
    assert not list(machine.directory.iterdir())


def test_off_waits_for_running_programs(machine: Machine) -> None:
    server = machine.prepare()
    client, pid = start(machine)
    assert f"process {server} ends after its 1 running job(s)" in machine.run("warm", "off").stdout
    assert machine.processes() == []
    assert Path(f"/proc/{pid}").exists()
    client.terminate()
    assert client.wait(60) == -signal.SIGTERM
    wait_for_end_of([server, pid])


def test_an_idle_process_ends(machine: Machine) -> None:
    server = machine.prepare(idle_s=0.2)
    wait_for_end_of([server])
    assert not list(machine.directory.iterdir())


def _line(terminal: int) -> str:
    text = b""
    while not text.endswith(b"\n"):
        text += os.read(terminal, 1)
    return text.decode()
