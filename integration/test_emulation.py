"""Emulated TPUs: layout, names and numbers, for plain torch_xla programs and for polyxla's."""

from __future__ import annotations

import itertools
import json
import os
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


@pytest.mark.slow
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
    for process, thread in itertools.product(range(local_processes * hosts), range(threads)):
        host, rank = divmod(process, local_processes)
        # Ordinals count through the coordinates, x first; the chips of a host count along y first.
        ordinal = (host * local_processes + (0, 2, 1, 3)[rank]) * threads + thread
        numbers = [ordinal, ordinal, size, rank * threads + thread, process]
        numbers += [local_processes * hosts, local_processes, host, threads]
        expected.append([str(number) for number in numbers] + ["TPU", "TPU", str(sum(range(size)))])
    assert described(done.stdout) == sorted(expected)
    layout = f"{local_processes} processes x {threads} threads"
    printed = [line for line in done.stderr.splitlines() if "emulating a" in line]
    assert len(printed) == 1
    assert f"emulating a {kind} on this machine's CPU: {size} replicas" in printed[0]
    assert layout in printed[0]


@pytest.mark.slow
def test_a_pods_hosts_are_started_one_by_one(clean_environ: dict[str, str]) -> None:
    addresses = f"127.77.{os.getpid() % 250}.1,127.77.{os.getpid() % 250}.2"
    pod = {**clean_environ, "POLYXLA_EMULATE": "v4-16", "TPU_WORKER_HOSTNAMES": addresses}
    hosts = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            env={**pod, "POLYXLA_EMULATE_HOST": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [host.communicate(timeout=300) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], outputs
    # The ordinal, the host, and the sum over all eight replicas.
    found = [[(line[1], line[7], line[11]) for line in described(output)] for output, _ in outputs]
    assert found == [
        [(str(ordinal), str(host), "28") for ordinal in range(host * 4, host * 4 + 4)] for host in range(2)
    ]
    for number, (_, said) in enumerate(outputs):
        assert f"emulating a v4-16, host {number} on this machine's CPU" in said


@pytest.mark.slow
def test_torch_xlas_questions_get_a_tpu_hosts_answers(clean_environ: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM.with_name("ask_host.py"))],
        env={**clean_environ, "POLYXLA_EMULATE": "v4-16", "POLYXLA_EMULATE_HOST": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "num_available_chips": 4,
        "num_available_devices": 4,
        "num_expected_global_devices": 8,
        "num_tpu_workers": 2,
        "get_worker_ips": ["127.0.0.1", "127.0.0.2"],
        "worker_id": 1,
        "version": 4,
        "get_tpu_type": "v4",
        "host_index": 1,
        "device_type": "TPU",
    }


@pytest.mark.slow
def test_one_chip_can_be_chosen_on_the_command_line(runtime: RuntimeUnderTest) -> None:
    done = runtime.run(
        "--devices", "[2]", "-m", "polyxla_examples.digits", "--epochs", "1", "--json", POLYXLA_EMULATE="v4-8"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["world_size"], result["device"]) == (1, "TPU")


@pytest.mark.slow
def test_chips_in_use_are_not_launched_on(runtime: RuntimeUnderTest, clean_environ: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM.with_name("launch_after_inline.py"))],
        env={**clean_environ, "POLYXLA_EMULATE": "v4-8"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "launch was called in a process that already uses a device" in done.stdout


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
    assert runtime.launch(_world, seen, devices=devices, start_method="forkserver") == [
        (ordinal, size, processes, "TPU", [7] * size, size // processes) for ordinal in range(size)
    ]


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
        for process in busy:
            process.kill()
            process.wait()
