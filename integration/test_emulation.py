"""Emulated TPUs: layout, names and numbers, for plain torch_xla programs and for polyxla's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from polyxla import Replica
from polyxla_testing import RuntimeUnderTest

pytestmark = pytest.mark.pjrt

PROGRAM = Path(__file__).parent / "programs" / "describe_replica.py"


def described(output: str) -> list[list[str]]:
    # Replicas that are threads may print into each other's lines.
    return sorted(found.split() for found in re.findall(r"DESCRIBED((?: \w+){12})", output))


@pytest.mark.parametrize(
    ("kind", "threads", "local_processes", "hosts"),
    [("v3-8", 2, 4, 1), pytest.param("v4-16", 1, 4, 2, marks=pytest.mark.long)],
)
def test_a_plain_program_sees_the_emulated_tpu(
    clean_environ: dict[str, str], kind: str, threads: int, local_processes: int, hosts: int
) -> None:
    # Under plain python: only the environment selects the emulation.
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env={**clean_environ, "POLYXLA_EMULATE": kind},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    size = threads * local_processes * hosts
    expected = []
    for ordinal in range(size):
        process = ordinal // threads
        host, rank = divmod(process, local_processes)
        numbers = [ordinal, ordinal, size, rank * threads + ordinal % threads, process]
        numbers += [local_processes * hosts, local_processes, host, threads]
        expected.append([str(number) for number in numbers] + ["TPU", "TPU", str(sum(range(size)))])
    assert described(done.stdout) == sorted(expected)
    layout = f"{local_processes} processes x {threads} threads"
    printed = [line for line in done.stderr.splitlines() if "emulating a" in line]
    assert len(printed) == 1
    assert f"emulating a {kind} on this machine's CPU: {size} replicas" in printed[0]
    assert layout in printed[0]


def _world(replica: Replica, seen: list[int]) -> tuple[int, int, int, str, list[int], int]:
    seen.append(replica.ordinal)
    world = replica.world
    gathered = replica.all_gather(7)
    return world.ordinal, world.world_size, world.process_count, replica.kind, gathered, len(seen)


@pytest.mark.parametrize(("devices", "processes"), [([5], 1), ([4, 5], 1), ([2, 3, 6, 7], 2)])
def test_a_job_can_use_some_of_the_cores(
    runtime: RuntimeUnderTest, monkeypatch: pytest.MonkeyPatch, devices: list[int], processes: int
) -> None:
    monkeypatch.setenv("POLYXLA_EMULATE", "v3-8")
    size = len(devices)
    seen: list[int] = []
    # Replicas that are threads of one process receive the same arguments.
    assert runtime.launch(_world, seen, devices=devices) == [
        (ordinal, size, processes, "TPU", [7] * size, size // processes) for ordinal in range(size)
    ]


@pytest.mark.long
def test_digits_trains_on_eight_emulated_cores(runtime: RuntimeUnderTest) -> None:
    done = runtime.run("-m", "polyxla_examples.digits", "--json", POLYXLA_EMULATE="v3-8")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["world_size"], result["device"]) == (8, "TPU")
    assert result["test_accuracy"] >= 0.97


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_replicas_in_threads_train_reliably_on_a_busy_machine(runtime: RuntimeUnderTest) -> None:
    """Twenty times: threads share their process's environment, and one in three runs failed for it."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for _ in range(20):
            done = runtime.run("-m", "polyxla_examples.digits", "--json", POLYXLA_EMULATE="v3-8")
            assert done.returncode == 0, done.stderr
    finally:
        for one in busy:
            one.kill()
            one.wait()
