"""Failures on TPUs whose library does not help: replicas that wait for another, and hosts that fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from polyxla.plugin import free_ports
from polyxla_testing import RuntimeUnderTest

pytestmark = pytest.mark.emulated_tpu

PROGRAMS = Path(__file__).parent / "programs"
PATIENCE_S = 300


def line_of(text: str) -> str:
    """Return a pattern of the only line of a program with a text."""
    lines = (PROGRAMS / "wait_on_tpu.py").read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if text in line]
    return rf"\S*wait_on_tpu\.py:{number}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        pytest.param(
            "sleep",
            "waited too long for other replicas: replicas? [023, ]+ waits? at {reading}; replica 1 is at "
            "{sleeping}, with no work for the device; the position",
            id="elsewhere",
        ),
        pytest.param(
            "return",
            # With the steps, where they are known.
            "replica 1 returned(?: after 0 steps)?; .*replicas? [023, ]+ waits? (?:in step 1 )?at {reading}",
            id="returned",
            marks=pytest.mark.long,
        ),
    ],
)
def test_replicas_in_their_devices_do_not_wait_for_ever(
    runtime: RuntimeUnderTest, how: str, expected: str
) -> None:
    done = runtime.run(
        str(PROGRAMS / "wait_on_tpu.py"), how, POLYXLA_EMULATE="v4-8", POLYXLA_STALL_TIMEOUT_S="6"
    )
    assert done.returncode == 1
    where = {"reading": line_of("all_reduce"), "sleeping": line_of("time.sleep")}
    text = f"^polyxla: error: .*{expected.format(**where)}"
    assert re.search(text, done.stderr, re.MULTILINE), done.stderr
    # libtpu prints a stack at SIGTERM, which the launcher sends to the others.
    assert "most recent call first" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sleep", pytest.param("return", marks=pytest.mark.long)])
def test_torchruns_processes_do_not_wait_for_ever(
    runtime: RuntimeUnderTest, clean_environ: dict[str, str], how: str
) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environ = {"POLYXLA_EMULATE": "v4-8", "POLYXLA_STALL_TIMEOUT_S": "6", "POLYXLA_RUNTIME": runtime.name}
    done = subprocess.run(
        [sys.executable, *command, str(PROGRAMS / "wait_on_tpu.py"), how],
        env=clean_environ | environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    ended = rf"is at {line_of('time.sleep')}, with no work for the device" if how == "sleep" else "returned"
    text = rf"^polyxla: replicas? [023, ]+ waits? at {line_of('all_reduce')}; replica 1 {ended}"
    assert re.search(text, done.stderr, re.MULTILINE), done.stderr


@pytest.mark.long
@pytest.mark.parametrize("how", ["compute", "compile"])
def test_nothing_ends_replicas_that_compute_or_compile(runtime: RuntimeUnderTest, how: str) -> None:
    done = runtime.run(
        str(PROGRAMS / "wait_on_tpu.py"), how, POLYXLA_EMULATE="v4-8", POLYXLA_STALL_TIMEOUT_S="2"
    )
    assert (done.returncode, done.stdout) == (0, "done\n" * 4), done.stderr


@contextmanager
def hosts_of(environ: dict[str, str], how: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a program on both hosts of a v4-16."""
    number, ports = os.getpid() % 250, free_ports(2)
    pod = {
        **environ,
        "POLYXLA_EMULATE": "v4-16",
        "TPU_WORKER_HOSTNAMES": f"127.78.{number}.1,127.78.{number}.2",
        # On TorchTPU, the hosts of each job of this machine meet at ports of their own.
        "MASTER_PORT": str(ports[0]),
        "TORCH_TPU_INTERNAL_HANDSHAKE_PORT": str(ports[1]),
    }
    command = [sys.executable, "-m", "polyxla", "run", str(PROGRAMS / "fail_on_host.py"), how]
    with ExitStack() as stack:
        hosts = []
        for host in range(2):
            process = stack.enter_context(
                subprocess.Popen(
                    command,
                    env={**pod, "POLYXLA_EMULATE_HOST": str(host)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            hosts.append(process)
        yield hosts


@pytest.mark.slow
def test_a_host_that_fails_ends_the_others(clean_environ: dict[str, str]) -> None:
    with hosts_of(clean_environ, "raise") as hosts:
        errors = [host.communicate(timeout=PATIENCE_S)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [1, 1]
    assert re.search(r"host 1 \(127.78.\d+.2\) failed: ValueError: no data", errors[0]), errors[0]
    assert "ValueError: no data" in errors[1]


@pytest.mark.parametrize("gone", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_host_whose_launch_is_killed_ends_the_others(clean_environ: dict[str, str], gone: int) -> None:
    with hosts_of(clean_environ, "wait") as hosts:
        for host in hosts:
            assert host.stdout is not None
            assert host.stdout.readline() == "STEP\n"
        hosts[gone].kill()
        _, error = hosts[1 - gone].communicate(timeout=PATIENCE_S)
    assert hosts[1 - gone].returncode == 1
    named = rf"host {gone} \(127.78.\d+.{gone + 1}\) is gone: its launching process ended"
    assert re.search(f"^polyxla: error: {named}", error, re.MULTILINE), error
