"""Whatever one client does, and whatever runs out: the warm process goes on, and so do its jobs."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polyxla_testing.processes import is_alive, wait_for_end_of, wait_until
from polyxla_tools.warm.sockets import find_sockets, reachable

if TYPE_CHECKING:
    from conftest import Machine

PROGRAMS = Path(__file__).parent / "programs"


def connect(machine: Machine) -> socket.socket:
    (path,) = find_sockets(machine.environ)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30)
    with reachable(path) as name:
        connection.connect(name)
    return connection


@pytest.mark.slow
def test_nonsense_ends_neither_the_process_nor_its_jobs(machine: Machine) -> None:
    server = machine.prepare()
    client = machine.start("run", PROGRAMS / "waits.py")
    assert client.stdout
    pid = int(client.stdout.readline())
    deep = "[" * 100_000
    texts = ["[1]", "3", "null", "{}", "nonsense", deep, '{"kind": "program"}', '{"kind": ["off"]}']
    texts += [
        '{"kind": "program", "surroundings": [], "environ": 3}',
        '{"kind": "check", "surroundings": {}}',
    ]
    requests = [struct.pack("!I", len(text)) + text.encode() for text in texts]
    for request in [*requests, b"\xff\xff\xff\xff", b"\0", b""]:
        with connect(machine) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
    assert is_alive(server)
    assert is_alive(pid)
    assert machine.run("run", PROGRAMS / "ends.py", "exit").stderr == ""
    assert machine.served() == 2


@pytest.mark.parametrize("message", [[1], {"signal": "x"}, {"signal": 10**9}, {"is_for_group": 1}])
def test_nonsense_in_place_of_a_signal_ends_the_program_only(message: object) -> None:
    from polyxla_tools.warm.server import Fork, Forks

    program = subprocess.Popen(["sleep", "300"])
    ours, theirs = socket.socketpair()
    forks = Forks()
    forks.add(program.pid, Fork(theirs, is_program=True))
    text = json.dumps(message).encode()
    ours.sendall(struct.pack("!I", len(text)) + text)
    forks.read(theirs)
    ours.close()
    if theirs.fileno() >= 0:
        # It was a number, of no signal: the program goes on until its client ends.
        forks.read(theirs)
    assert program.wait(60) == -signal.SIGKILL


@pytest.mark.slow
def test_without_descriptors_a_start_is_cold_and_the_jobs_go_on(machine: Machine) -> None:
    server = machine.prepare()
    client = machine.start("run", PROGRAMS / "waits.py")
    assert client.stdout
    pid = int(client.stdout.readline())
    used = max(int(path.name) for path in Path(f"/proc/{server}/fd").iterdir()) + 1
    limits = resource.prlimit(server, resource.RLIMIT_NOFILE)
    resource.prlimit(server, resource.RLIMIT_NOFILE, (used, limits[1]))
    for _ in range(2):
        done = machine.run("run", PROGRAMS / "ends.py", "exit")
        assert done.returncode == 3
        assert f"warm: process {server} did not answer" in done.stderr
        assert "this start is cold" in done.stderr
    assert is_alive(pid)
    resource.prlimit(server, resource.RLIMIT_NOFILE, limits)
    assert machine.run("run", PROGRAMS / "ends.py", "exit").stderr == ""
    client.send_signal(signal.SIGINT)
    assert client.wait(60) == 7
    wait_for_end_of([pid])
    assert machine.served() == 2


@pytest.mark.slow
def test_a_stopped_process_is_named(warm: Machine) -> None:
    (server,) = (process["pid"] for process in warm.processes())
    os.kill(server, signal.SIGSTOP)
    problem = f"process {server} is stopped (kill -CONT {server} continues it, kill -KILL {server} ends it)"
    assert warm.processes() == [{"pid": server, "problem": problem}]
    assert f"polyxla: warm: {problem}\n" == warm.run("warm", "status").stderr
    done = warm.run("warm", "off")
    assert (done.returncode, done.stdout) == (1, f"warm: {problem}\n")
    done = warm.run("run", PROGRAMS / "ends.py", "exit")
    assert (done.returncode, done.stderr) == (3, f"polyxla: warm: {problem}; this start is cold\n")
    os.kill(server, signal.SIGCONT)
    wait_until(lambda: "age_s" in warm.processes()[0], "the process answers again")
    assert warm.run("run", PROGRAMS / "ends.py", "exit").stderr == ""
