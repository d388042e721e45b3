"""Replicas that are forked from a warm process with the modules of runtime pjrt."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polyxla_testing.processes import WAIT_S, wait_for_end_of

if TYPE_CHECKING:
    from conftest import Machine

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def pjrt(machine: Machine) -> Machine:
    """A user with a warm process for runtime pjrt."""
    done = machine.run("warm", "on")
    assert (done.returncode, done.stderr) == (0, "")
    assert "is ready" in done.stdout
    assert "is ready already" in machine.run("warm", "on").stdout
    return machine


@pytest.mark.slow
def test_replicas_of_a_warm_and_of_a_cold_program_are_forked(pjrt: Machine) -> None:
    done = pjrt.run("run", "--devices", "2", PROGRAMS / "reduces.py")
    assert (done.stdout, done.stderr) == ("[4.0, 4.0]\n", "")
    # The program and its fork server.
    assert pjrt.served() == 2
    environ = {**pjrt.environ, "POLYXLA_DEVICES": "2"}
    command = [sys.executable, str(PROGRAMS / "reduces.py")]
    cold = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert (cold.stdout, cold.stderr) == ("[4.0, 4.0]\n", "")
    assert pjrt.served() == 3


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_replicas_end_with_the_client(pjrt: Machine, number: signal.Signals) -> None:
    client = pjrt.start("run", "--devices", "2", PROGRAMS / "reduces.py", "wait")
    assert client.stdout
    pids = [int(client.stdout.readline()) for _ in range(2)]
    client.send_signal(number)
    assert client.wait(WAIT_S) == (130 if number == signal.SIGINT else -number)
    wait_for_end_of(pids)


@pytest.mark.slow
def test_an_emulated_tpu_starts_warm_and_is_what_a_cold_program_sees(pjrt: Machine) -> None:
    environ = {"PJRT_DEVICE": "", "POLYXLA_EMULATE": "v4-8"}
    done = pjrt.run("run", PROGRAMS / "reduces.py", environ=environ)
    assert done.stdout == "[8.0, 8.0, 8.0, 8.0]\n"
    assert "this start is cold" not in done.stderr
    warm = pjrt.run("run", PROGRAMS / "describes_tpu.py", environ=environ)
    # Each program and its fork server; the second program does not launch its replicas.
    assert pjrt.served() == 4
    pjrt.run("warm", "off")
    cold = pjrt.run("run", PROGRAMS / "describes_tpu.py", environ=environ)
    assert (warm.returncode, warm.stdout) == (0, cold.stdout)
    assert "'_found_libtpu': True" in cold.stdout
